"""`python -m celosia.driver.cli`: the command where it is not installed."""

from celosia.driver.cli import main

if __name__ == "__main__":
    main()
