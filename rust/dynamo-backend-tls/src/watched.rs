//! What is made of some files, and made again when one of them is another one than before.
//!
//! Files are checked when a connection begins, at most once a second, so a certificate that is replaced serves the next
//! connection. A replacement that cannot be read leaves the old one in service and is an error in the log.

use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use dynamo_backend_common::DynamoError;
use dynamo_backend_common::tls::TlsFile;

/// A storm of connections must not pay for a look each.
const LOOK: Duration = Duration::from_secs(1);

/// What tells one version of a file from another; links are followed, as Kubernetes swaps links.
type Identity = Option<(u64, u64, i64, i64, u64)>;

struct Held<T> {
    value: T,
    seen: Vec<Identity>,
    looked_at: Instant,
}

/// The newest version that could be loaded.
pub(crate) struct Watched<T> {
    files: Vec<TlsFile>,
    load: Box<dyn Fn() -> Result<T, DynamoError> + Send + Sync>,
    held: Mutex<Held<T>>,
}

impl<T: Clone> Watched<T> {
    /// Fails as `load` does.
    pub(crate) fn new(
        files: Vec<TlsFile>,
        load: impl Fn() -> Result<T, DynamoError> + Send + Sync + 'static,
    ) -> Result<Self, DynamoError> {
        let seen = identities(&files);
        let held = Mutex::new(Held { value: load()?, seen, looked_at: Instant::now() });
        Ok(Self { files, load: Box::new(load), held })
    }

    pub(crate) fn current(&self) -> T {
        self.current_after(LOOK)
    }

    /// Looks at the files unless that was done in the last `patience`.
    fn current_after(&self, patience: Duration) -> T {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.looked_at.elapsed() >= patience {
            held.looked_at = Instant::now();
            let seen = identities(&self.files);
            if seen != held.seen {
                held.seen = seen;
                let settings: Vec<&str> = self.files.iter().map(|file| file.setting).collect();
                let settings = settings.join(", ");
                match (self.load)() {
                    Ok(value) => {
                        held.value = value;
                        tracing::info!("the files of {settings} have changed; new connections use them");
                    }
                    Err(error) => tracing::error!(
                        "the files of {settings} have changed and cannot be used; the old ones stay in service: {error}"
                    ),
                }
            }
        }
        held.value.clone()
    }
}

fn identities(files: &[TlsFile]) -> Vec<Identity> {
    let identity = |file: &TlsFile| {
        let found = std::fs::metadata(&file.path).ok()?;
        Some((found.ino(), found.dev(), found.mtime(), found.mtime_nsec(), found.size()))
    };
    files.iter().map(identity).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_changed_is_read_again_and_a_broken_one_leaves_the_old() {
        let path = std::env::temp_dir().join(format!("watched-{}", std::process::id()));
        std::fs::write(&path, "one").expect("a file");
        let (place, files) = (path.clone(), vec![TlsFile { setting: "SETTING", path: path.clone() }]);
        let load = move || match std::fs::read_to_string(&place) {
            Ok(text) if text != "broken" => Ok(text),
            _ => Err(DynamoError::builder().message("broken").build()),
        };
        let watched = Watched::new(files, load).expect("a value");
        assert_eq!(watched.current(), "one");
        std::fs::write(&path, "the other").expect("a file");
        assert_eq!(watched.current(), "one"); // within the second
        assert_eq!(watched.current_after(Duration::ZERO), "the other");
        std::fs::write(&path, "broken").expect("a file");
        assert_eq!(watched.current_after(Duration::ZERO), "the other");
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(watched.current_after(Duration::ZERO), "the other");
    }
}
