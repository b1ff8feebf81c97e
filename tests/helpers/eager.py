"""Runs the module that an export traces, eagerly in float32."""

import torch

from eagle3.export.pipeline import load_speculator, make_metadata
from eagle3.export.planning.plan import Plan
from eagle3.export.speculator.speculator import Eagle3Speculator
from eagle3.runner.hosts.session import EagerSession
from eagle3.targets.attention import EagerAttention
from eagle3.targets.spec import Convert


def eager_speculator(plan: Plan, convert: Convert | None = None) -> Eagle3Speculator:
    return load_speculator(plan, EagerAttention, torch.float32, convert)


def eager_session(plan: Plan, speculator: Eagle3Speculator | None = None) -> EagerSession:
    """Return a session that runs ``speculator``, by default a new one made from ``plan``."""
    speculator = speculator or eager_speculator(plan)
    return EagerSession(speculator, make_metadata(plan, {}, speculator.draft.ids_in_target()))
