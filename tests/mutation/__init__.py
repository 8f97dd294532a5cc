"""Random faults in hw/, each against the checks that can find it: a mutation campaign. docs/mutants.md tells how."""
