//! The hashes of the wire, of the model card and of KV blocks, written out so that no C library is needed.

pub(crate) mod blake3;
pub(crate) mod sha256;
pub(crate) mod xxh3;

/// Writes bytes as lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
    }
    text
}
