"""Polynomials of the elements of a row and of its mean and mean square, which the operators of a normalisation compute.

A normalisation that is written in single operators computes sums and products of

    x   the elements of a row
    m   the mean of x
    s   the mean of x^2
    v   s - m^2 + epsilon or s + epsilon, also to powers of 1/2, such as the inverse root

A polynomial is a dictionary from the exponents of x, m, s and the square root of v to coefficients. As polynomials have
one form, however they were computed, `normal_form` recognises (x - m) / sqrt(v) * gamma + beta in any order of
operators.

>>> x = Polynomial({(1, 0, 0, 0): np.ones(1)})
>>> centred = add(x, scale(mean(x), -np.ones(1)))
>>> variance = add(mean(multiply(centred, centred)), Polynomial({NUMBER: np.full(1, 0.25)}))
>>> normal_form(multiply(centred, power(variance, -0.5)))
NormalForm(is_centred=True, gamma=array([1.]), beta=array([0.]), epsilon=0.25)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Exponents = tuple[int, int, int, int]
"""Exponents of x, m, s and the square root of v."""
NUMBER: Exponents = (0, 0, 0, 0)
ELEMENT: Exponents = (1, 0, 0, 0)
MEAN: Exponents = (0, 1, 0, 0)
SQUARED_MEAN: Exponents = (0, 2, 0, 0)
MEAN_SQUARE: Exponents = (0, 0, 1, 0)
NORMALISED: Exponents = (1, 0, 0, -1)
NORMALISED_MEAN: Exponents = (0, 1, 0, -1)
TOLERANCE = 1e-6
"""Relative difference up to which coefficients count as equal: constants are float32, or were quantised."""


class NotARowError(Exception):
    """An operator computes no polynomial of the elements, mean and mean square of a row."""


@dataclass(frozen=True)
class Radicand:
    """v = s - m^2 + epsilon (is_centred), or s + epsilon."""

    is_centred: bool
    epsilon: float


@dataclass(frozen=True)
class Polynomial:
    """A sum of terms.

    terms: exponents -> coefficients, arrays that broadcast along the axes of x. radicand: v; None if no term has it.
    """

    terms: Mapping[Exponents, Array]
    radicand: Radicand | None = None


@dataclass(frozen=True)
class NormalForm:
    """gamma (x - m) / sqrt(v) + beta; is_centred is False without m, here and in v."""

    is_centred: bool
    gamma: Array
    beta: Array
    epsilon: float


def add(a: Polynomial, b: Polynomial) -> Polynomial:
    """Return a + b. Terms that cancel within TOLERANCE are left out. Raises NotARowError for two radicands."""
    terms = dict(a.terms)
    for exponents, coefficient in b.terms.items():
        _add_term(terms, exponents, coefficient)
    return Polynomial(terms, _common_radicand(a, b))


def multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    """Return a * b. Raises NotARowError for two radicands."""
    terms: dict[Exponents, Array] = {}
    for (first, c), (second, d) in product(a.terms.items(), b.terms.items()):
        exponents = (first[0] + second[0], first[1] + second[1], first[2] + second[2], first[3] + second[3])
        _add_term(terms, exponents, c * d)
    return Polynomial(terms, _common_radicand(a, b))


def scale(a: Polynomial, factor: Array) -> Polynomial:
    """Return a * factor, for constant factors."""
    return multiply(a, Polynomial({NUMBER: factor}))


def mean(a: Polynomial, axis: int | None = None) -> Polynomial:
    """Return the mean of `a` over a row, which runs along `axis` of x; None if coefficients are scalars.

    Raises NotARowError if coefficients differ along the row, or for powers of x above the second.
    """
    terms: dict[Exponents, Array] = {}
    for (x, m, s, root), coefficient in a.terms.items():
        if x > 2 or (axis is not None and coefficient.ndim > 1 and coefficient.shape[axis] > 1):
            raise NotARowError
        _add_term(terms, (0, m + (x == 1), s + (x == 2), root), coefficient)
    return Polynomial(terms, a.radicand)


def power(a: Polynomial, exponent: float) -> Polynomial:
    """Return `a` to the power of 2, or of a multiple of 1/2 if `a` is v or a power of it, but for a positive factor.

    Raises NotARowError for other powers and other polynomials.
    """
    if exponent == 2:
        return multiply(a, a)
    if len(a.terms) == 1:
        ((exponents, coefficient),) = a.terms.items()
        roots = exponents[3] * exponent
        may_raise = np.all(coefficient > 0) or (float(exponent).is_integer() and np.all(coefficient != 0))
        if exponents[:3] == NUMBER[:3] and float(roots).is_integer() and may_raise:
            return Polynomial({(0, 0, 0, int(roots)): coefficient**exponent}, a.radicand)
    factor, radicand = _as_radicand(a)
    if not float(2 * exponent).is_integer():
        raise NotARowError
    return Polynomial({(0, 0, 0, int(2 * exponent)): factor**exponent}, radicand)


def may_be_negative(a: Polynomial, elements: bool) -> bool:
    """Return whether `a` differs along a row and may be negative there. elements: whether x may be negative.

    Polynomials of even degree are squares and variances. None that a normalisation computes is negative.
    """
    if not any(exponents[0] for exponents in a.terms):
        return False
    odd = [c for exponents, c in a.terms.items() if (exponents[0] + exponents[1]) % 2]
    return bool(odd) and (elements or any(np.any(c < 0) for c in (*odd, a.terms.get(NUMBER, np.zeros(1)))))


def normal_form(a: Polynomial) -> NormalForm | None:
    """Return the normalisation that `a` is; None if it is none."""
    gamma, beta = a.terms.get(NORMALISED), a.terms.get(NUMBER, np.zeros(1))
    if gamma is None or a.radicand is None or not set(a.terms) <= {NORMALISED, NORMALISED_MEAN, NUMBER}:
        return None
    minus_mean = a.terms.get(NORMALISED_MEAN)
    is_centred = minus_mean is not None
    if is_centred != a.radicand.is_centred or (minus_mean is not None and not _are_equal(-minus_mean, gamma)):
        return None
    return NormalForm(is_centred, gamma, beta, a.radicand.epsilon)


def _as_radicand(a: Polynomial) -> tuple[Array, Radicand]:
    """Return (factor, v), whose product is `a`. Raises NotARowError if it is none."""
    factor, squared_mean = a.terms.get(MEAN_SQUARE), a.terms.get(SQUARED_MEAN)
    epsilon = a.terms.get(NUMBER, np.zeros(1))
    if factor is None or not set(a.terms) <= {MEAN_SQUARE, SQUARED_MEAN, NUMBER}:
        raise NotARowError
    if any(array.size > 1 for array in (factor, epsilon)) or factor.item() <= 0 or epsilon.item() < 0:
        raise NotARowError
    if squared_mean is not None and not _are_equal(-squared_mean, factor):
        raise NotARowError
    return factor, Radicand(squared_mean is not None, epsilon.item() / factor.item())


def _common_radicand(a: Polynomial, b: Polynomial) -> Radicand | None:
    """Return the radicand that the terms of both polynomials share. Raises NotARowError if they differ."""
    radicands = [p.radicand for p in (a, b) if p.radicand is not None and any(e[3] for e in p.terms)]
    if len(radicands) == 2 and radicands[0] != radicands[1]:
        first, second = radicands
        if first.is_centred != second.is_centred or not np.isclose(first.epsilon, second.epsilon, TOLERANCE, 0):
            raise NotARowError
    return radicands[0] if radicands else None


def _add_term(terms: dict[Exponents, Array], exponents: Exponents, coefficient: Array) -> None:
    """Add a term to `terms`; leave it out if it cancels another, or is zero."""
    old = terms.pop(exponents, np.zeros(1))
    total = old + coefficient
    if np.any(np.abs(total) > TOLERANCE * np.maximum(np.abs(old), np.abs(coefficient))):
        terms[exponents] = total


def _are_equal(a: Array, b: Array) -> bool:
    """Return whether coefficients are equal within TOLERANCE."""
    return bool(np.all(np.abs(a - b) <= TOLERANCE * np.abs(b)))
