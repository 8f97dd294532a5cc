"""Programs on other machines, over ssh."""
