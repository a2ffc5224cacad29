"""The lengths of documents are read from the device once for a tensor of places."""

from __future__ import annotations

import torch

from parplan.executor.models.attention_modules import document_lengths


def test_layers_that_read_the_same_places_wait_for_one_copy(monkeypatch):
    places = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    copies, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(self) or cpu(self))

    lengths = [document_lengths(places) for _ in range(3)]

    assert lengths == [((3, 2), (1, 4))] * 3
    assert len(copies) == 1
    assert document_lengths(places.clone()[:1]) == ((3, 2),)
