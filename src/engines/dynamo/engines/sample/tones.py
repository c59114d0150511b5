"""Text as tones, and tones as text: each half of a byte of its UTF-8 is one of sixteen tones, so that nothing is lost.

A sound begins with a gap as long as one tone, which gives its speed, and with the lowest tone, which gives its pitch.
"""

from __future__ import annotations

import codecs
import math
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from blake3 import blake3

SAMPLE_RATE: Final = 24_000  # of 16 bits, one channel: what OpenAI's `pcm` is
BYTES_PER_SECOND: Final = 2 * SAMPLE_RATE
TONE_SAMPLES: Final = 240  # at speed 1: 10 ms
LOUDNESS: Final = 12_000
LOWEST: Final = 4  # waves in one tone
REGISTERS: Final = 3
MAX_WAVES: Final = LOWEST + 3 * (REGISTERS - 1) + 15  # below half of the samples of the shortest tone, which has 60


class Tones:
    """The sounds of one voice at one speed."""

    def __init__(self, voice: str, speed: float) -> None:
        self.samples = round(TONE_SAMPLES / speed)
        register = blake3(voice.encode(errors="replace")).digest()[0] % REGISTERS
        lowest = LOWEST + 3 * register
        self._tones = [_tone(lowest + number, self.samples) for number in range(16)]

    def opening(self) -> bytes:
        """Return what comes before the first character."""
        return bytes(2 * self.samples) + self._tones[0]

    def of(self, text: str) -> bytes:
        """Return the sound of a part of a text."""
        halves = [half for byte in text.encode(errors="replace") for half in divmod(byte, 16)]
        return b"".join([self._tones[half] for half in halves])

    def size(self, text: str) -> int:
        """Return how many bytes of sound a whole text has."""
        return 2 * self.samples * (2 + 2 * len(text.encode(errors="replace")))


def _tone(waves: int, samples: int) -> bytes:
    step = 2 * math.pi * waves / samples
    return struct.pack(f"<{samples}h", *[round(LOUDNESS * math.cos(step * at)) for at in range(samples)])


def wav_header(data_bytes: int) -> bytes:
    """Return what comes before so many bytes of samples in a WAV file."""
    size, rate = (36 + data_bytes).to_bytes(4, "little"), SAMPLE_RATE.to_bytes(4, "little")
    pace = BYTES_PER_SECOND.to_bytes(4, "little")
    plain = b"\x10\0\0\0\x01\0\x01\0" + rate + pace + b"\x02\0\x10\0"  # PCM, one channel, 16 bits
    return b"RIFF" + size + b"WAVEfmt " + plain + b"data" + data_bytes.to_bytes(4, "little")


class Heard(NamedTuple):
    """One character of a sound, and its time in seconds."""

    text: str
    start: float
    end: float


def heard(data: bytes) -> Iterator[Heard]:
    """Walk the characters of a sound of 16-bit samples. Raises ValueError for one that is not made of our tones."""
    gap = (len(data) - len(data.lstrip(b"\0"))) // 2
    size = 2 * gap  # of one tone, in bytes
    if not TONE_SAMPLES // 4 <= gap <= TONE_SAMPLES * 4 or len(data) % size or len(data) < 2 * size:
        raise ValueError("it is not made of the tones of the sample engine")
    lowest = _waves(data[size : 2 * size], range(1, MAX_WAVES + 1))
    known = {_tone(lowest + number, gap): number for number in range(16)}
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    began = high = 0
    for number, at in enumerate(range(2 * size, len(data), size)):
        window = data[at : at + size]
        half = known.get(window)
        if half is None:  # the sound was changed on its way: the loudest of the tones
            half = _waves(window, range(lowest, lowest + 16)) - lowest
        if number % 2 == 0:
            high = half
            began = began or at
            continue
        if text := utf8.decode(bytes([16 * high + half])):
            yield Heard(text, began / BYTES_PER_SECOND, (at + size) / BYTES_PER_SECOND)
            began = 0


def _waves(window: bytes, candidates: range) -> int:
    """Return the number of waves, of some, that is the loudest in a window."""
    samples = struct.unpack(f"<{len(window) // 2}h", window)
    step = 2 * math.pi / len(samples)

    def power(waves: int) -> float:
        angles = [step * waves * at for at in range(len(samples))]
        real: float = sum(sample * math.cos(angle) for sample, angle in zip(samples, angles, strict=True))
        imaginary: float = sum(sample * math.sin(angle) for sample, angle in zip(samples, angles, strict=True))
        return real * real + imaginary * imaginary

    return max(candidates, key=power)
