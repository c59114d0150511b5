//! How a worker becomes known: records in a store, kept alive until it leaves.

mod etcd;
mod file;

use std::path::PathBuf;
use std::sync::Arc;

use tokio::task::JoinHandle;

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

    /// Returns where listeners listen unless told otherwise: on loopback where discovery is of one machine.
    fn default_host(&self) -> &'static str;
}

/// Writes a record without holding up the runtime.
pub(crate) async fn put(discovery: &Arc<dyn Discovery>, key: String, record: String) -> Result<(), DynamoError> {
    let discovery = Arc::clone(discovery);
    finished(tokio::task::spawn_blocking(move || discovery.put(&key, &record))).await
}

/// Removes a record without holding up the runtime.
pub(crate) async fn delete(discovery: &Arc<dyn Discovery>, key: String) -> Result<(), DynamoError> {
    let discovery = Arc::clone(discovery);
    finished(tokio::task::spawn_blocking(move || discovery.delete(&key))).await
}

/// Closes a store without holding up the runtime.
pub(crate) async fn close(discovery: Arc<dyn Discovery>) {
    // A close that panicked has nothing left to do.
    let _ = tokio::task::spawn_blocking(move || discovery.close()).await;
}

async fn finished(work: JoinHandle<Result<(), DynamoError>>) -> Result<(), DynamoError> {
    match work.await {
        Ok(outcome) => outcome,
        Err(error) => Err(DynamoError::builder().message("discovery could not be written").cause(error).build()),
    }
}

/// Opens the store that the operator chose.
///
/// `lease_id` is that of the worker's records, where the store has leases. Blocks until the store has answered. Fails for a store
/// that this SDK does not speak to: what it names can be served by a Python worker.
pub(crate) fn open(chosen: Option<&str>, lease_id: u64) -> Result<Arc<dyn Discovery>, DynamoError> {
    let chosen = chosen.map(str::to_owned).or_else(|| settings::text("DYN_DISCOVERY_BACKEND"));
    let etcd = settings::text("ETCD_ENDPOINTS");
    let root = || {
        let root = settings::text("DYN_FILE_KV").map(PathBuf::from);
        root.unwrap_or_else(|| std::env::temp_dir().join("dynamo_store_kv"))
    };
    match (chosen.as_deref(), etcd) {
        (None | Some("auto" | "etcd"), Some(endpoints)) => Ok(Arc::new(etcd::EtcdStore::open(&endpoints, lease_id)?)),
        (Some("etcd"), None) => {
            let root = root();
            tracing::warn!(
                "discovery: etcd was asked for, but ETCD_ENDPOINTS is not set; using files in {}, which serve the processes \
                 of one machine",
                root.display()
            );
            Ok(Arc::new(file::FileStore::open(root)?))
        }
        (None | Some("auto" | "file"), _) => Ok(Arc::new(file::FileStore::open(root())?)),
        (Some(other), _) => Err(DynamoError::invalid(format!(
            "discovery_backend {other:?} is not built into the Rust SDK: use --discovery-backend file (one machine), etcd, or \
             a Python worker"
        ))),
    }
}
