"""Adapters: castore under the interfaces that training code already speaks. Each needs its own extra installed."""
