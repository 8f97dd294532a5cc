"""`first_difference` finds and names the first difference between two devices."""

import pytest
from configs import CONFIGS
from first_difference import first_difference
from programs import random_program

from celosia.hw.spec.isa import OUTER_LOOPS, Opcode
from celosia.sim.functional.fsim import FunctionalDevice, Instruction
from celosia.sim.functional.reference import addresses

CFG = CONFIGS["4x4"]


class Faulty(FunctionalDevice):
    """A device whose VECTOR number `victim` flips a bit of its results in out."""

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
    difference = first_difference(FunctionalDevice(CFG), faulty, image, 0, len(words))
    assert difference is not None and difference.opcode == "STORE" and difference.producer == faulty.victim
    assert difference.expected ^ difference.found == 4
    assert f"which instruction {faulty.victim} (VECTOR) wrote" in str(difference)


def test_a_failing_instruction_is_named() -> None:
    program = random_program(CFG, 1, count=5)
    image = program.loaded()
    image[7 * 64 : 8 * 64] = 0
    difference = first_difference(FunctionalDevice(CFG), FunctionalDevice(CFG), image, 0, len(program.instructions))
    assert str(difference) == "instruction 7 (?): instruction 7: an illegal instruction: opcode 0 does not exist"
