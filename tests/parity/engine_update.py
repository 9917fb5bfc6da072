"""The update of the engine's rules, section 2, bit for bit, on numpy arrays: every operation is FP32, rounded once.

Slow and plain: what the optimizer's kernels must equal, written a second time.
"""

import math

import numpy as np

_TINY_GRADIENT = np.float32(2.0**-56).view(np.uint32)
_TINY_MOMENT = np.float32(2.0**-100).view(np.uint32)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def fma(a, b, c):
    """a*b + c in FP32, rounded once. The product is exact in double; the sum is rounded to odd there, which makes the
    rounding to FP32 that follows the right one (53 bits are more than 24 + 2)."""
    with np.errstate(all="ignore"):
        a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
        product, c = np.broadcast_arrays(a * b, c)
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64).copy()
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    # One step towards the exact value; bits grow with the magnitude.
    bits[inexact] += np.where((error > 0) == (total > 0), 1, -1)[inexact]
    with np.errstate(all="ignore"):
        return bits.view(np.float64).astype(np.float32)


def scalars(step, learning_rate, betas, epsilon, decay):
    """`step` counts from 1. All in double, then rounded once to FP32."""
    b1, b2 = betas
    one = np.float32
    return {"b1": one(b1), "c1": one(1 - b1), "b2": one(b2), "c2": one(1 - b2), "eps": one(epsilon),
            "d": one(1 - learning_rate * decay), "a": one(learning_rate / (1 - b1**step)),
            "q": one(1 / math.sqrt(1 - b2**step))}


def update(master, moment1, moment2, gradient, values, clip=1.0):
    """FP32 arrays in, (master, moment1, moment2) out."""
    v = values
    k = np.float32(clip)
    g = np.asarray(gradient, np.float32)
    with np.errstate(all="ignore"):
        if k != 1:
            g = g * k
        g = np.where((g.view(np.uint32) & _MAGNITUDE) < _TINY_GRADIENT, np.float32(0), g)
        m = fma(v["b1"], moment1, v["c1"] * g)
        s = fma(v["b2"], moment2, v["c2"] * (g * g))
        w = fma(-v["a"], m / fma(np.sqrt(s), v["q"], v["eps"]), v["d"] * np.asarray(master, np.float32))
    if v["a"] == 0 and v["d"] == 1:
        w = np.array(master, np.float32)  # Learning rate 0 changes nothing, the sign of zero included.
    m = np.where((m.view(np.uint32) & _MAGNITUDE) < _TINY_MOMENT, np.float32(0), m)
    s = np.where((s.view(np.uint32) & _MAGNITUDE) < _TINY_MOMENT, np.float32(0), s)
    return w, m, s


def split(master):
    """FP32 masters to (weight as BF16 bits, weight_low): rounded half away from zero."""
    bits = np.asarray(master, np.float32).view(np.uint32).copy()
    bits[np.isnan(master)] = 0x7FC00000
    weight = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    low = (bits - (weight.astype(np.uint32) << np.uint32(16))).astype(np.uint16).view(np.int16)
    return weight, low


def join(weight, low):
    bits = (np.asarray(weight, np.uint16).astype(np.uint32) << np.uint32(16)) + low.astype(np.int32).view(np.uint32)
    return bits.view(np.float32)
