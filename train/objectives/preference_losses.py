"""Losses of preferences: how much more likely a preferred answer should be than another, and beside which model."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from train.objectives.preference import PreferenceLoss

LEAST_IMPROBABLE = 1e-6
"""Answers are not taken as more likely than 1 minus this for each token: their odds would be infinite."""


class Dpo(PreferenceLoss):
    """Direct preference optimization: -log sigmoid of the difference of the rewards, a reward being beta times the
    log-likelihood's difference from the reference's (Rafailov et al. 2023, arXiv 2305.18290, equation 7)."""

    has_reference = True

    def reward(self, likelihoods: Tensor, tokens: Tensor) -> Tensor:
        return self.beta * likelihoods

    def compute(self, likelihoods: Tensor, tokens: Tensor) -> Tensor:
        chosen, rejected = self.reward(likelihoods, tokens).unbind(1)
        return -logsigmoid(chosen - rejected)


class Orpo(PreferenceLoss):
    """Odds ratio preference optimization: the mean cross-entropy of the preferred answer's tokens, and beta times -log
    sigmoid of the log odds ratio, where the probability of an answer is its tokens' geometric mean (Hong et al. 2024,
    arXiv 2403.07691, equations 3 to 7; beta is their lambda). A reward is beta times the mean log-likelihood."""

    has_reference = False

    def reward(self, likelihoods: Tensor, tokens: Tensor) -> Tensor:
        return self.beta * likelihoods / tokens

    def compute(self, likelihoods: Tensor, tokens: Tensor) -> Tensor:
        means = (likelihoods / tokens).clamp(max=-LEAST_IMPROBABLE)
        chosen, rejected = (means - torch.log(-torch.expm1(means))).unbind(1)
        return -means[:, 0] - self.beta * logsigmoid(chosen - rejected)
