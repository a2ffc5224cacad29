"""Arguments are found in shell scripts and YAML files as people write them."""

from __future__ import annotations

from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.files.shell_words import shell_arguments, yaml_arguments

SCRIPT = """#!/bin/bash
# --commented-out 7
export TP=${TP:-8}
NODES=4
WORLD=$((NODES * $TP))
ARGS=(
    --tensor-model-parallel-size $TP  # a comment
    --pipeline-model-parallel-layout "Et|(t|)*3L"
    --swiglu)
MORE_ARGS="
    --global-batch-size ${WORLD} \\
    --bf16
"
LIST+=("--fp8-format hybrid" --lr=1e-4)
torchrun --nnodes $NODES --nproc_per_node 8 train.py ${ARGS[@]} \\
    model.seq_length=4096 --recompute-modules layernorm \\
    mlp
"""


def test_a_script_gives_its_arguments_with_their_lines():
    assert shell_arguments(SCRIPT, "a.sh") == (
        Given("--tensor-model-parallel-size", ("8",), "a.sh:7"),
        Given("--pipeline-model-parallel-layout", ("Et|(t|)*3L",), "a.sh:8"),
        Given("--swiglu", (), "a.sh:9"),
        Given("--global-batch-size", ("32",), "a.sh:11"),
        Given("--bf16", (), "a.sh:12"),
        Given("--fp8-format", ("hybrid",), "a.sh:14"),
        Given("--lr", ("1e-4",), "a.sh:14"),
        Given("--nnodes", ("4",), "a.sh:15"),
        Given("--nproc_per_node", ("8", "train.py", "${ARGS[@]}"), "a.sh:15"),
        Given("model.seq_length", ("4096",), "a.sh:16"),
        Given("--recompute-modules", ("layernorm", "mlp"), "a.sh:16"),
    )


def test_what_a_script_does_not_set_stays_as_it_stands():
    (given,) = shell_arguments("run --tensor-model-parallel-size $UNSET\n", "b.sh")

    assert given.words == ("$UNSET",)


def test_yaml_has_an_argument_a_line_and_switches_that_are_true():
    text = (
        "MODEL_ARGS:\n  --num-layers: 12\n  --bf16: true\n  --swiglu: false\n  --modules: [a, b]\n"
    )

    assert yaml_arguments(text, "c.yaml") == (
        Given("--num-layers", ("12",), "c.yaml:2"),
        Given("--bf16", (), "c.yaml:3"),
        Given("--modules", ("a", "b"), "c.yaml:5"),
    )
