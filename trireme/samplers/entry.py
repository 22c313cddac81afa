"""What orders examples by samplers, as its entry point declares it."""

from __future__ import annotations

from trireme.data.request import OrderType

SAMPLERS = OrderType("trireme.samplers.orders:order_of")
