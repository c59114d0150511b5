//! The wires, sans-io: bytes in, values out. `mux` version 1 (`docs/wire.md`), and the native one in a module of its own.

pub(crate) mod frames;
pub(crate) mod items;
pub(crate) mod msgpack;
pub(crate) mod native;
pub(crate) mod secret;
pub(crate) mod value;

#[cfg(test)]
mod vectors;
