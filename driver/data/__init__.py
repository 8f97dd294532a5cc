"""Samples, images and arrays that users give."""
