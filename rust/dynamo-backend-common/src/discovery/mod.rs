//! How a worker becomes known: records in a store, kept alive until it leaves.

mod file;

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::DynamoError;
use crate::settings;

/// A store of records. Its methods block for a few milliseconds.
pub(crate) trait Discovery: Send + Sync + 'static {
    /// Writes a record and keeps it alive.
    fn put(&self, key: &str, value: &str) -> Result<(), DynamoError>;

    /// Removes a record; absent is fine.
    fn delete(&self, key: &str) -> Result<(), DynamoError>;

    /// Removes what is left and stops keeping it alive.
    fn close(&self);
}

/// Opens the store that the operator chose.
///
/// Fails for a store that this SDK does not speak to: what it names can be served by a Python worker.
pub(crate) fn open(chosen: Option<&str>) -> Result<Arc<dyn Discovery>, DynamoError> {
    let chosen = chosen.map(str::to_owned).or_else(|| settings::text("DYN_DISCOVERY_BACKEND"));
    let etcd = settings::text("ETCD_ENDPOINTS");
    let backend = match chosen.as_deref() {
        None | Some("auto") => {
            if etcd.is_some() {
                "etcd"
            } else {
                "file"
            }
        }
        Some(name) => name,
    };
    match backend {
        "file" => {
            let root = settings::text("DYN_FILE_KV").map(PathBuf::from);
            let root = root.unwrap_or_else(|| std::env::temp_dir().join("dynamo_store_kv"));
            Ok(Arc::new(file::FileStore::open(root)?))
        }
        other => Err(DynamoError::invalid(format!(
            "discovery_backend {other:?} is not built into the Rust SDK yet: use --discovery-backend file (one machine), \
             or a Python worker for a cluster"
        ))),
    }
}
