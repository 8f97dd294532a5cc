"""Running Programs on a Device."""
