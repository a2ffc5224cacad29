"""A process that can write only in its own folder, for any user, and reach no network.

Uses Landlock (Linux 5.13 and later). A fuzzer passes paths such as /dev/full as outputs. If root
ran a program that replaces its output, the program would replace the device itself; Landlock
refuses that with EACCES, as it is refused to any other user.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

# System calls, equal on every architecture.
_CREATE = 444
_ADD = 445
_RESTRICT = 446
_VERSION = 1  # flag of _CREATE: answer the version instead
_NO_NEW_PRIVILEGES = 38  # an option of prctl
_BENEATH = 1  # a rule for a folder and all in it
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13  # renaming from folder to folder
_FIRST_WITH = {_REFER: 2, _TRUNCATE: 3}  # the first version with each
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_INTERFACE_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
DEVICES = ("/dev/null", "/dev/full", "/dev/tty")  # may be written to, not replaced
SHARED = "/dev/shm"  # semaphores and shared memory of processes


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """Return the version of Landlock, or 0 without Landlock."""
    return max(0, _libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)))


def require() -> None:
    """Raise RuntimeError if nothing confines a process: root, without Landlock."""
    if version() == 0 and os.geteuid() == 0:
        raise RuntimeError(
            "the fuzzer writes to hostile paths, and this kernel has no Landlock: "
            "run it as another user than root"
        )


def leave_the_network() -> None:
    """Give this process and its children an interface of their own, the loopback.

    Without root, libraries are told to stay offline.
    """
    if _libc().unshare(_NEW_NETWORK):
        os.environ["HF_HUB_OFFLINE"] = "1"
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _INTERFACE_FLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))


def contain(folder: Path) -> None:
    """Confine writes of this process and its children to `folder` and a few devices."""
    known = version()
    if not known:
        return
    whole = (
        _WRITE_FILE
        | _MAKE_AND_REMOVE
        | sum(right for right, first in _FIRST_WITH.items() if known >= first)
    )
    libc = _libc()
    ruleset = _Ruleset(whole)
    handle = libc.syscall(
        _CREATE, ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset)), ctypes.c_uint32(0)
    )
    _checked(handle)
    for path in (os.fspath(folder), SHARED):
        _allow(handle, path, whole)
    for path in DEVICES:
        _allow(handle, path, whole & (_WRITE_FILE | _TRUNCATE))
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(libc.syscall(_RESTRICT, handle, ctypes.c_uint32(0)))
    os.close(handle)


def _allow(ruleset: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _Rule(rights, place)
    _checked(_libc().syscall(_ADD, ruleset, _BENEATH, ctypes.byref(rule), ctypes.c_uint32(0)))
    os.close(place)


def _checked(answer: int) -> None:
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
