"""What commands show: tables and texts."""
