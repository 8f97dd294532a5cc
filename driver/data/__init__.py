"""Samples, images and arrays from a user's files."""
