//! The `mux` wire, version 1, sans-io: bytes in, values out (`docs/wire.md`).

pub(crate) mod frames;
pub(crate) mod items;
pub(crate) mod msgpack;
pub(crate) mod secret;

#[cfg(test)]
mod vectors;
