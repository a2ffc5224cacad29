"""Arguments that a reader knows and that leave the time and the memory of a step as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmless:
    """Names without effect on a step, from one page or file.

    source   the page of the documentation, or the file of the repository, that explains them
    names    whole names, with dashes for underscores
    starts   beginnings of names, such as a section with its dot
    """

    source: str
    names: frozenset[str]
    starts: tuple[str, ...]

    def has(self, name: str) -> bool:
        plain = _plain(name)
        return plain in self.names or plain.startswith(self.starts)


def harmless(source: str, text: str) -> Harmless:
    """Returns the names of a text; `*` at the end of a word stands for any further letters."""
    words = [_plain(word) for word in text.split()]
    return Harmless(
        source=source,
        names=frozenset(word for word in words if not word.endswith("*")),
        starts=tuple(word[:-1] for word in words if word.endswith("*")),
    )


def is_harmless(name: str, tables: Iterable[Harmless]) -> bool:
    return any(table.has(name) for table in tables)


def _plain(name: str) -> str:
    return name.replace("_", "-")


# Arguments of the programs that start processes, in scripts of every launcher.
STARTING = (
    harmless(
        "torch/distributed/run.py",
        """--nnodes --nproc-per-node --node-rank --master-addr --master-port --rdzv-*
        --standalone --max-restarts --monitor-interval --start-method --role --module
        --no-python --run-path --log-dir --redirects --tee --local-ranks-filter --local-addr
        --logs-specs --event-log-handler --numa-binding --signals-to-handle
        --virtual-local-rank --duplicate-*""",
    ),
    harmless(
        "slurm.schedmd.com/sbatch.html and srun.html",
        """--job-name --nodes --ntasks --ntasks-per-node --gpus --gpus-per-node --gpus-per-task
        --gres --gres-flags --cpus-per-task --cpus-per-gpu --mem --mem-per-cpu --mem-per-gpu
        --mem-bind --cpu-bind --time --partition --account --qos --output --error --open-mode
        --exclusive --mail-type --mail-user --export --constraint --dependency --array
        --requeue --no-requeue --nodelist --exclude --overcommit --segment --signal --comment
        --reservation --licenses --wait --kill-on-bad-exit --label --unbuffered --mpi --chdir
        --oversubscribe --nodefile --distribution --wckey --hint --threads-per-core --begin
        --deadline --ntasks-per-gpu --wait-all-nodes --container-image --container-mounts
        --container-workdir --container-name --container-writable --container-remap-root
        --no-container-* --container-env --container-save --container-mount-home --jobid
        --het-group --overlap --cpu-freq --accel-bind --gpu-bind --network""",
    ),
    harmless(
        "docs.docker.com/reference/cli/docker/container/run and apptainer.org",
        """--ipc --shm-size --ulimit --rm --runtime --privileged --volume --workdir --network
        --env --env-file --name --user --entrypoint --nv --bind --cleanenv --pwd --mount
        --device --cap-add --security-opt --hostname --interactive --detach --restart --init""",
    ),
    harmless(
        "docs.open-mpi.org, deepspeed.readthedocs.io (launcher) and the shell",
        """--allow-run-as-root --hostfile --map-by --bind-to --mca --host --include --exclude
        --num-gpus --num-nodes --master --launcher --launcher-args --force-multi --ssh-port
        --no-ssh --no-local-rank --enable-each-rank-log --elastic-training --save-pid
        --version --help --query-gpu --format --upgrade --quiet --no-cache-dir
        --extra-index-url --no-deps --user --recursive --depth --branch --retry --parents
        --no-verify --bind-cores-to-rank --bind-core-list --trace --sample --capture-range
        --capture-range-end --cuda-memory-usage --cuda-graph-trace --force-overwrite
        --stop-on-exit --kill --delay --duration --backtrace --local-rank --local_rank""",
    ),
)
