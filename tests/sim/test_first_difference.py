"""The first difference between two devices is found and named."""

import pytest
from configs import CONFIGS
from first_difference import first_difference
from programs import random_program

from celosia.hw.spec.isa import OUTER_LOOPS, Opcode
from celosia.sim.functional.fsim import FunctionalDevice, Instruction
from celosia.sim.functional.reference import addresses

CFG = CONFIGS["4x4"]


class Faulty(FunctionalDevice):
    """Its `n`-th VECTOR to out flips a bit of what it wrote."""

    victim = -1

    def execute(self, instruction: Instruction, number: int = 0) -> None:
        super().execute(instruction, number)
        if number == self.victim:
            f = instruction.fields
            self.state.out[addresses(f, "dst", OUTER_LOOPS, CFG.out_depth).ravel()] ^= 4


@pytest.mark.parametrize("seed", range(5))
def test_planted_fault_is_traced_to_the_instruction_that_made_it(seed: int) -> None:
    program = random_program(CFG, seed, count=30)
    image, words = program.loaded(), program.words()
    assert first_difference(FunctionalDevice(CFG), FunctionalDevice(CFG), image, 0, len(words)) is None
    faulty = Faulty(CFG)
    faulty.victim = next(
        i
        for i, instruction in reversed(list(enumerate(program.instructions)))
        if instruction.opcode == Opcode.VECTOR and instruction.fields["destination"] == 1
    )
    found = first_difference(FunctionalDevice(CFG), faulty, image, 0, len(words))
    assert found is not None and found.opcode == "STORE" and found.producer == faulty.victim
    assert found.expected ^ found.found == 4
    assert f"which instruction {faulty.victim} (VECTOR) wrote" in str(found)


def test_a_failing_instruction_is_named() -> None:
    program = random_program(CFG, 1, count=5)
    image = program.loaded()
    image[7 * 64 : 8 * 64] = 0
    found = first_difference(FunctionalDevice(CFG), FunctionalDevice(CFG), image, 0, len(program.instructions))
    assert str(found) == "instruction 7 (?): instruction 7: an illegal instruction: opcode 0 does not exist"
