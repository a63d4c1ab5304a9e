"""The teacher's outputs, whatever they are, as targets."""

from torch import Tensor

from compress.distill.distillation_loss import Imitation, Terms, relative
from compress.distill.hooks import Pass
from laconic.errors import UsageError


class Outputs(Imitation):
    """The squared error of each output, as a share of the teacher's squared, for each row; the mean over the outputs.

    Of logits it is what Ba and Caruana match (2014, arXiv:1312.6184). Outputs that are no floating-point numbers are
    left out.
    """

    def fit(self, student: Pass, teacher: Pass) -> None:
        own, theirs = ([list(each.shape) for each in seen.answers.values()] for seen in (student, teacher))
        if own != theirs:
            raise UsageError(
                f"the student's outputs are of the shapes {own}, and its teacher's {theirs}; expected the same. Keep "
                f"what the model answers with as it was"
            )

    def loss(self, student: Pass, teacher: Pass, terms: Terms) -> Tensor:
        both = list(zip(student.answers.values(), teacher.answers.values(), strict=True))
        errors = [
            relative(found.flatten(1).float(), wanted.flatten(1).float())
            for found, wanted in both
            if wanted.is_floating_point()
        ]
        return terms.total(sum(errors[1:], errors[0]) / len(errors))
