"""Outputs of tools as they print them, shortened to the lines that say something."""

from __future__ import annotations

NVIDIA_SMI = "NVIDIA H100 80GB HBM3, 81559\n" * 8
ROCM_SMI = (
    '{"card0": {"Card Series": "AMD Instinct MI300X OAM", "Card Model": "0x74a1", '
    '"VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297766912"}, '
    '"card1": {"Card Series": "AMD Instinct MI300X OAM", "Card Model": "0x74a1", '
    '"VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297766912"}, '
    '"system": {"Driver version": "6.8.5"}}'
)
LSPCI = """\
18:00.0 Ethernet controller: Intel Corporation Ethernet Controller E810-C for QSFP (rev 02)
1b:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
1c:00.0 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]
43:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
44:00.0 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]
44:00.1 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]
52:00.0 Ethernet controller: Mellanox Technologies MT28908 Family [ConnectX-6]
"""
IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_1'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_2'
\tCA type: MT4123
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 100
\t\tLink layer: Ethernet
CA 'mlx5_3'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Down
\t\tPhysical state: Disabled
\t\tRate: 400
\t\tLink layer: InfiniBand
"""
NUMACTL = """\
available: 2 nodes (0-1)
node 0 cpus: 0 1 2 3
node 0 size: 1031725 MB
node 0 free: 1002011 MB
node 1 cpus: 4 5 6 7
node 1 size: 1032160 MB
node 1 free: 998134 MB
node distances:
node   0   1
  0:  10  21
  1:  21  10
"""
TOPOLOGY_PAIRS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tNODE\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\tNODE\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1
NIC0\tNODE\tNODE\tSYS\tSYS\t X \t\t
"""
SINFO = """\
cpu* 40 (null) 515000
gpu 12 gpu:h100:8(S:0-1) 2063885
gpu 4 gpu:h100:8(S:0-1) 2063885
old 20 gpu:nvidia_a100-sxm4-80gb:4 1031700+
"""
SWITCHES = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[001-004]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu[005-008]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=gpu[001-008] Switches=leaf[1-2]
"""
