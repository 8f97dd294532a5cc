"""Random faults in hw/, each against the checks that can find it: a mutation campaign. See docs/mutants.md."""
