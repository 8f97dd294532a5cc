"""Try the proofs of the unit in which a mutant lies: python -m mutation.prove FILE, in the tree with the mutant.

A property is checked for the first `reach` cycles, as with its own planted mutants. Prints JSON lines, see campaign.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from proofs.declare import Method, Property, all_properties
from proofs.run import ProofError, build, decide


def say(**event: str) -> None:
    print(json.dumps(event), flush=True)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def before(name: str, case: int | None) -> str:
    """Return the digest of a property's design without the mutant."""
    path = Path(os.environ["MUTANTS_TEXTS"])
    digests: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    key = f"{name} {case}"
    if key not in digests:
        tree = os.environ["MUTANTS_BASE"]
        paths = os.pathsep.join((f"{tree}/src", f"{tree}/tests/formal"))
        command = [sys.executable, "-W", "ignore", "-m", "proofs.build", name, "" if case is None else str(case)]
        environment = os.environ | {"PYTHONPATH": paths}
        process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tree)
        digests[key] = digest(process.stdout)
        path.write_text(json.dumps(digests))
    return digests[key]


def main(file: str) -> None:
    """Check the properties that have a planted mutant in `file`, those in `make test` first."""
    properties = [proof for proof in all_properties().values() if any(mutant.file == file for mutant in proof.mutants)]
    for proof in sorted(properties, key=_cost):
        case = proof.planted if proof.cases else None
        try:
            text = build(proof, None, case)
            if digest(text) == before(proof.name, case):
                continue
            say(differs=proof.name)
            bounded = Method.BOUNDED if proof.method is Method.INDUCTION else proof.method
            result = decide(proof, text, proof.reach, bounded)
        except ProofError as error:
            say(unbuilt=proof.name, note=str(error)[-300:])
            return
        if not result.holds:
            say(killed=proof.name, note=result.found[:300])
            return


def _cost(proof: Property) -> tuple[bool, int]:
    return not proof.tested, proof.reach


if __name__ == "__main__":
    main(sys.argv[1])
