"""A training loop in plain torch, on one process with whole batches: what any other way to run it is compared with.

Imports nothing of the library under test.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import default_collate

from small_llama import Recipe, Text, Trace, build_model, make_schedule, summed_loss


def train_by_hand(recipe: Recipe, *, orders: Sequence[Sequence[int]], global_batch: int) -> Trace:
    """Train one epoch per order of rows, `global_batch` rows per update; the last update of an epoch takes the rest."""
    text = Text(len(orders[0]), is_padded=recipe.scores == "sums")
    model = build_model()
    optimizer = recipe.make_optimizer(model)
    schedule = make_schedule(optimizer)
    trace = Trace()
    for order in orders:
        for start in range(0, len(order), global_batch):
            batch = default_collate([text[row] for row in order[start : start + global_batch]])
            trace.rows.append(batch.pop("row").tolist())
            if recipe.scores == "means":
                loss = model(**batch).loss
            else:
                loss_sum, count = summed_loss(model, batch)
                loss = loss_sum / count
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
            trace.losses.append(loss.item())
            trace.norms.append(norm.item())
            trace.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    trace.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return trace
