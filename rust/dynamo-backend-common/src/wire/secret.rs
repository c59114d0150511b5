//! The shared secret: both sides prove that they know it, and it never travels.

use std::fmt;
use std::path::Path;

use crate::error::DynamoError;
use crate::hash::{hex, sha256};

/// What a side can do that proves the secret.
pub(crate) const CAPABILITY: &str = "secret";
/// The setting that names the file.
pub(crate) const SETTING: &str = "DYN_TCP_SECRET_PATH";
/// The characters of a nonce.
pub(crate) const NONCE_CHARACTERS: usize = 64;

const MIN_SECRET_BYTES: usize = 16;
const MAX_SECRETS: usize = 8;
const MAX_FILE_BYTES: usize = 64 * 1024;

/// The secrets of a file, one on each line: the first one is proven, all of them are accepted.
pub(crate) struct SharedSecret {
    lines: Vec<Vec<u8>>,
}

impl fmt::Debug for SharedSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SharedSecret({} lines)", self.lines.len())
    }
}

impl SharedSecret {
    /// Reads a file. Fails, naming the setting, where it holds no usable secret.
    pub(crate) fn read(path: &Path) -> Result<Self, DynamoError> {
        let content = std::fs::read(path)
            .map_err(|error| DynamoError::invalid(format!("{SETTING}: cannot read {}: {error}", path.display())))?;
        let lines: Vec<Vec<u8>> = content
            .split(|byte| *byte == b'\n')
            .map(|line| line.trim_ascii().to_vec())
            .filter(|line| !line.is_empty())
            .collect();
        if lines.is_empty() || lines.len() > MAX_SECRETS || content.len() > MAX_FILE_BYTES {
            let text = format!("{SETTING}: {} holds {} secrets; use 1 to {MAX_SECRETS}", path.display(), lines.len());
            return Err(DynamoError::invalid(text));
        }
        if lines.iter().any(|line| line.len() < MIN_SECRET_BYTES) {
            let text = format!("{SETTING}: a secret of {} has fewer than {MIN_SECRET_BYTES} bytes", path.display());
            return Err(DynamoError::invalid(text));
        }
        Ok(Self { lines })
    }

    /// Returns the worker's proof for one connection.
    pub(crate) fn prove(&self, caller_nonce: &str, worker_nonce: &str) -> String {
        proof(&self.lines[0], "worker", caller_nonce, worker_nonce)
    }

    /// Returns whether the caller proved one of the secrets, in the same time whatever is wrong.
    pub(crate) fn is_known(&self, given: &[u8], caller_nonce: &str, worker_nonce: &str) -> bool {
        self.lines.iter().fold(false, |found, secret| {
            found | sha256::same(proof(secret, "caller", caller_nonce, worker_nonce).as_bytes(), given)
        })
    }
}

fn proof(secret: &[u8], role: &str, caller_nonce: &str, worker_nonce: &str) -> String {
    let text = format!("dynamo mux 1 {role}\0{caller_nonce}\0{worker_nonce}");
    hex(&sha256::hmac(secret, text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_the_secrets_is_accepted_and_no_other() {
        let secret = SharedSecret { lines: vec![b"a secret of some length".to_vec(), b"the one before it".to_vec()] };
        let (mine, theirs) = ("c".repeat(NONCE_CHARACTERS), "w".repeat(NONCE_CHARACTERS));
        for line in &secret.lines {
            assert!(secret.is_known(proof(line, "caller", &mine, &theirs).as_bytes(), &mine, &theirs));
        }
        assert!(!secret.is_known(secret.prove(&mine, &theirs).as_bytes(), &mine, &theirs));
        assert!(!secret.is_known(b"", &mine, &theirs));
    }
}
