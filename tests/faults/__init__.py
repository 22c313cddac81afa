"""Faults, injected by wrapping: nothing in Trireme knows of them.

hook       a worker is killed, stopped, or raises, at a step of its own
processes  tasks of a job are killed, stopped and continued from outside
proxy      a TCP proxy on loopback that delays, slows, holds, loses or cuts what goes through it
frames     what such a proxy does to single frames: repeats, swaps and truncates them
hosts      hosts in this machine: network namespaces with addresses of their own, to cut and slow
limits     a full disk, no more descriptors, little memory
"""

from tests.faults.hook import Fault, Faults, Injected
from tests.faults.proxy import Proxies, Proxy, unnoticed

__all__ = ["Fault", "Faults", "Injected", "Proxies", "Proxy", "unnoticed"]
