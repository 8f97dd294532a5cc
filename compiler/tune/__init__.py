"""Search for schedules: spaces, searches, measurements, records of them, and processes that measure."""
