//! Random numbers of the system.

use std::fs::File;
use std::io::{self, Read};

fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut found = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut found)?;
    Ok(found)
}

/// Returns the id of a worker: 53 bits, which every reader of JSON keeps exact, and never 0.
pub(crate) fn worker_id() -> io::Result<u64> {
    let number = u64::from_be_bytes(bytes()?) >> 11;
    Ok(number.max(1))
}

/// Returns 32 random bytes in hex.
pub(crate) fn hex_nonce() -> io::Result<String> {
    Ok(crate::hash::hex(&bytes::<32>()?))
}

/// Returns 8 random bytes in hex, for the name of a temporary file.
pub(crate) fn hex_name() -> io::Result<String> {
    Ok(crate::hash::hex(&bytes::<8>()?))
}

/// Returns a random start for numbers that follow each other.
pub(crate) fn seed() -> io::Result<u64> {
    bytes().map(u64::from_be_bytes)
}
