"""Generate rules that nobody wrote: enumerate terms, group equal ones, prune, prove, and keep what wins on a network.

vocabularies     the tensors and operators of which terms are made, and how many operators a term may have
enumeration      all terms up to that size, grouped by fingerprints of their values: equations
subsumption      whether a rule follows from others
generator        equations become candidates, and candidates rules; which rules save cycles on a network
"""
