//! Records as files: `ROOT/{bucket}/{percent-encoded key}`, renewed by a thread of their own.
//!
//! Every write is one rename, so a reader never sees half a record. The lock that other programs take on the directory
//! only saves them work, and is not taken here.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use super::Discovery;
use crate::error::{DynamoError, ErrorType};
use crate::plane::lock;

/// How often a record is renewed. Readers take one for dead that is older than 10 seconds.
const RENEW: Duration = Duration::from_secs(3);

#[derive(Default)]
struct Owned {
    records: BTreeMap<PathBuf, String>,
    is_closed: bool,
}

struct Shared {
    owned: Mutex<Owned>,
    closed: Condvar,
}

/// A directory of records.
pub(crate) struct FileStore {
    root: PathBuf,
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl FileStore {
    /// Makes the root and begins to renew what will be written.
    pub(crate) fn open(root: PathBuf) -> Result<Self, DynamoError> {
        let failed = |error: io::Error| {
            let text = format!(
                "cannot use the file discovery store at {}: {error}. Name a directory of your own in DYN_FILE_KV",
                root.display()
            );
            DynamoError::top(ErrorType::CannotConnect, text)
        };
        fs::create_dir_all(&root).map_err(failed)?;
        let shared = Arc::new(Shared { owned: Mutex::default(), closed: Condvar::new() });
        let renewed = Arc::clone(&shared);
        let keeper =
            std::thread::Builder::new().name("discovery".into()).spawn(move || keep_alive(&renewed)).map_err(failed)?;
        Ok(Self { root, shared, keeper: Mutex::new(Some(keeper)) })
    }

    fn place(&self, key: &str) -> Result<PathBuf, DynamoError> {
        let mut parts = key.splitn(3, '/');
        match (parts.next(), parts.next(), parts.next()) {
            (Some(first), Some(second), Some(inside)) if !inside.is_empty() => {
                Ok(self.root.join(first).join(second).join(encode_name(inside)))
            }
            _ => Err(DynamoError::invalid(format!("discovery key {key:?} names no record"))),
        }
    }
}

impl Discovery for FileStore {
    fn put(&self, key: &str, value: &str) -> Result<(), DynamoError> {
        let path = self.place(key)?;
        // Under the lock, so that the keeper does not renew what is just being written.
        let mut owned = lock(&self.shared.owned);
        write(&path, value).map_err(|error| {
            DynamoError::top(ErrorType::CannotConnect, format!("cannot write {}: {error}", path.display()))
        })?;
        owned.records.insert(path, value.to_owned());
        Ok(())
    }

    fn delete(&self, key: &str) -> Result<(), DynamoError> {
        let path = self.place(key)?;
        let mut owned = lock(&self.shared.owned);
        owned.records.remove(&path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let text = format!("cannot remove {}: {error}", path.display());
                Err(DynamoError::top(ErrorType::CannotConnect, text))
            }
            _ => Ok(()),
        }
    }

    fn default_host(&self) -> &'static str {
        "127.0.0.1"
    }

    fn close(&self) {
        let mut owned = lock(&self.shared.owned);
        owned.is_closed = true;
        for path in std::mem::take(&mut owned.records).into_keys() {
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!("could not remove {} from discovery: {error}; it expires by itself", path.display());
            }
        }
        drop(owned);
        self.shared.closed.notify_all();
        if let Some(keeper) = lock(&self.keeper).take() {
            // It returns at once; a keeper that panicked has nothing left to do either.
            let _ = keeper.join();
        }
    }
}

fn keep_alive(shared: &Shared) {
    let mut owned = lock(&shared.owned);
    let mut is_failing = false;
    while !owned.is_closed {
        let mut failure = None;
        for (path, value) in &owned.records {
            if let Err(error) = renew(path, value) {
                failure = Some(format!("{}: {error}", path.display()));
            }
        }
        match (&failure, is_failing) {
            (Some(text), false) => tracing::warn!("file discovery store failed: {text}; trying again"),
            (None, true) => tracing::info!("file discovery store is back"),
            _ => {}
        }
        is_failing = failure.is_some();
        owned = shared.closed.wait_timeout(owned, RENEW).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Renews a file's time; one that another process took for dead is written again.
fn renew(path: &Path, value: &str) -> io::Result<()> {
    match File::options().write(true).open(path) {
        Ok(file) => file.set_modified(SystemTime::now()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            tracing::warn!("{} was removed by another process; writing it again", path.display());
            write(path, value)
        }
        Err(error) => Err(error),
    }
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let temporary = directory.join(format!(".tmp_{}", crate::random::hex_name()?));
    let written = fs::write(&temporary, value).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // What is left of it expires like any other file of the store.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Encodes a key as a file name: every byte but ASCII letters and digits becomes %XX.
fn encode_name(key: &str) -> String {
    let mut name = String::with_capacity(key.len() * 2);
    for byte in key.bytes() {
        if byte.is_ascii_alphanumeric() {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02X}"));
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (FileStore, PathBuf) {
        let root = std::env::temp_dir().join(format!("dynamo-rust-{}", crate::random::hex_name().expect("random")));
        (FileStore::open(root.clone()).expect("a store"), root)
    }

    #[test]
    fn a_record_is_a_file_named_by_its_key() {
        let (store, root) = store();
        store.put("v1/instances/n/a_b/c-d/1f", "{}").expect("written");
        let path = root.join("v1/instances/n%2Fa%5Fb%2Fc%2Dd%2F1f");
        assert_eq!(fs::read_to_string(&path).expect("a file"), "{}");
        store.delete("v1/instances/n/a_b/c-d/1f").expect("removed");
        store.delete("v1/instances/n/a_b/c-d/1f").expect("absent is fine");
        assert!(!path.exists());
        assert!(store.put("v1/instances", "{}").is_err());
        store.close();
        fs::remove_dir_all(root).expect("removed");
    }

    #[test]
    fn a_record_that_was_taken_away_is_written_again() {
        let (store, root) = store();
        let path = root.join("v1/mdc/a");
        store.put("v1/mdc/a", "x").expect("written");
        fs::remove_file(&path).expect("removed");
        renew(&path, "x").expect("renewed");
        assert_eq!(fs::read_to_string(&path).expect("a file"), "x");
        store.close();
        assert!(!path.exists());
        fs::remove_dir_all(root).expect("removed");
    }
}
