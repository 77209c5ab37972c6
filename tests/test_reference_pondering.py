"""The reference of probabilistic halting: the distribution over steps, the prior, and what departing from it costs."""

import array_api_strict as strict
import numpy as np
import pytest
import torch

from veriformer.reference import divergence, geometric_prior, stick_breaking

pytestmark = pytest.mark.filterwarnings("error")
FRAMEWORKS = [np.asarray, strict.asarray, torch.tensor]


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_worked_numbers(convert):
    p = stick_breaking(convert(np.asarray([[0.5, 0.5, 0.5], [0.0, 1.0, 0.5], [0.25, 0.0, 0.0]])))
    np.testing.assert_array_equal(np.asarray(p), [[0.5, 0.25, 0.25], [0, 1, 0], [0.25, 0, 0.75]])
    prior = geometric_prior(0.5, 3, like=p)
    np.testing.assert_allclose(np.asarray(prior), np.asarray([4, 2, 1]) / 7, rtol=1e-15)
    assert prior.dtype == p.dtype
    wanted = np.asarray([0.5 * np.log(7 / 8) + 0.25 * np.log(7 / 8) + 0.25 * np.log(7 / 4), np.log(3.5), 0])
    wanted[2] = 0.25 * np.log(0.25 * 7 / 4) + 0.75 * np.log(0.75 * 7)
    np.testing.assert_allclose(np.asarray(divergence(p, prior)), wanted, rtol=1e-13)


def test_is_a_distribution_and_its_logarithm_telescopes():
    halting = np.random.default_rng(0).random((4, 3, 6))
    p = stick_breaking(halting)
    np.testing.assert_allclose(p.sum(-1), np.ones((4, 3)), rtol=1e-15)
    np.testing.assert_allclose(p[..., -1], (1 - halting[..., :-1]).prod(-1), rtol=1e-14)
    assert (stick_breaking(halting[..., :1]) == 1).all()


def test_divergence_is_zero_at_the_prior_and_positive_elsewhere():
    prior = geometric_prior(0.3, 5, like=np.zeros(0))
    np.testing.assert_allclose(divergence(prior, prior), 0, atol=1e-16)
    p = stick_breaking(np.random.default_rng(1).random((50, 5)))
    assert (divergence(p, prior) > 0).all()


def test_direction_of_the_divergence():
    """Where p never goes it costs nothing; the other direction would be infinite."""
    p, g = np.asarray([1.0, 0.0]), np.asarray([0.5, 0.5])
    np.testing.assert_allclose(divergence(p, g), np.log(2), rtol=1e-15)
    with np.errstate(divide="ignore"):
        assert divergence(g, p) == np.inf


def test_gradients():
    halting = torch.rand((2, 4), dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 0.8 + 0.1
    prior = geometric_prior(0.4, 4, like=halting)
    assert torch.autograd.gradcheck(lambda h: divergence(stick_breaking(h), prior), halting.requires_grad_())


def test_the_last_probability_given_does_not_matter():
    one, other = np.asarray([0.5, 0.25, 0.0]), np.asarray([0.5, 0.25, 1.0])
    np.testing.assert_array_equal(stick_breaking(one), stick_breaking(other))


def test_certain_halting_is_the_prior_of_rate_one():
    np.testing.assert_array_equal(geometric_prior(1.0, 3, like=np.zeros(0)), [1, 0, 0])
    np.testing.assert_allclose(geometric_prior(1e-18, 4, like=np.zeros(0)), np.full(4, 0.25), rtol=1e-15)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, np.nan])
def test_rate_out_of_range_is_an_error(rate):
    with pytest.raises(ValueError, match=r"rate: got .*, wanted a number in \(0, 1\]"):
        geometric_prior(rate, 3, like=np.zeros(0))


def test_no_steps_are_an_error():
    with pytest.raises(ValueError, match="wanted at least one step"):
        stick_breaking(np.ones((2, 0)))
    with pytest.raises(ValueError, match="steps: got 0, wanted at least 1"):
        geometric_prior(0.5, 0, like=np.zeros(0))
    with pytest.raises(ValueError, match="prior: got 2 steps, wanted 3"):
        divergence(np.ones(3), np.ones(2))
