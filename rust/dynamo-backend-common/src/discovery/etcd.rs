//! Records in etcd, over its JSON gateway: one lease for all of them, renewed by a thread of its own.
//!
//! The thread also puts right what the store lacks. A lease that was lost is taken again under its old id, so that the worker
//! keeps its name; a store that does not answer is asked again for as long as the worker lives.

mod client;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use client::{Client, Failure, encode};

use super::Discovery;
use crate::error::{DynamoError, ErrorType};
use crate::plane::lock;
use crate::settings;

/// Two renewals may be lost before the lease runs out.
const RENEWALS_PER_TTL: f64 = 3.0;
/// Two other endpoints can still be tried before the lease runs out.
const ATTEMPTS_PER_TTL: f64 = 6.0;
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(1);
/// How long giving the lease back may take; it runs out by itself.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// What this process wants to be in the store.
#[derive(Default)]
struct Wanted {
    records: BTreeMap<String, String>,
    /// Keys that were deleted while the store did not answer.
    unwanted: BTreeSet<String>,
    is_closed: bool,
}

struct Shared {
    wanted: Mutex<Wanted>,
    closed: Condvar,
    client: Client,
    lease_id: u64,
    ttl: Duration,
}

/// An etcd cluster.
pub(crate) struct EtcdStore {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

fn seconds(name: &str, default: f64) -> Duration {
    Duration::try_from_secs_f64(settings::float(name, default, 0.1)).unwrap_or(Duration::MAX)
}

impl EtcdStore {
    /// Takes a lease under this id and begins to renew it. Fails, naming the setting, where etcd cannot be used.
    pub(crate) fn open(endpoints: &str, lease_id: u64) -> Result<Self, DynamoError> {
        let asked = settings::float("ETCD_LEASE_TTL", 10.0, 1.0).round();
        let attempt = seconds("ETCD_KEEPALIVE_TIMEOUT_SECONDS", asked / ATTEMPTS_PER_TTL);
        let client = Client::new(endpoints, attempt)?;
        let ttl = first_grant(&client, lease_id, asked as u64)?;
        tracing::info!("discovery: etcd at {} (ETCD_ENDPOINTS)", client.describe());
        let shared = Arc::new(Shared {
            wanted: Mutex::default(),
            closed: Condvar::new(),
            client,
            lease_id,
            ttl: Duration::from_secs(ttl.max(1)),
        });
        let kept = Arc::clone(&shared);
        let keeper =
            std::thread::Builder::new().name("discovery".into()).spawn(move || kept.keep()).map_err(|error| {
                DynamoError::builder().message("the thread of discovery cannot be started").cause(error).build()
            })?;
        Ok(Self { shared, keeper: Mutex::new(Some(keeper)) })
    }
}

fn first_grant(client: &Client, lease_id: u64, ttl: u64) -> Result<u64, DynamoError> {
    let limit = seconds("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", 5.0);
    let (began, mut delay) = (Instant::now(), FIRST_DELAY);
    loop {
        // A lease is granted to anybody, so the right to read is looked at first.
        let failure = match client.check_access("v1/instances/").and_then(|()| client.grant(lease_id, ttl)) {
            Ok(ttl) => return Ok(ttl),
            Err(failure) => failure,
        };
        if matches!(failure, Failure::Declined { .. }) || began.elapsed() + delay >= limit {
            let text = format!(
                "cannot use etcd at {} (ETCD_ENDPOINTS): {failure}. Start it, correct ETCD_ENDPOINTS, or choose another store \
                 with --discovery-backend (file needs no service)",
                client.describe()
            );
            return Err(DynamoError::top(ErrorType::CannotConnect, text));
        }
        std::thread::sleep(delay);
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

impl Shared {
    /// Writes one record; a lease that is gone is taken again first.
    fn write(&self, key: &str, value: &str) -> Result<(), Failure> {
        match self.client.put(key, value, self.lease_id) {
            Err(failure) if failure.is_not_found() => {
                self.take_again()?;
                self.client.put(key, value, self.lease_id)
            }
            outcome => outcome,
        }
    }

    fn take_again(&self) -> Result<(), Failure> {
        tracing::warn!("etcd no longer knows the lease {:x}; taking it again", self.lease_id);
        self.client.grant(self.lease_id, self.ttl.as_secs()).map(drop)
    }

    /// Renews the lease and puts the store right until the store is closed.
    fn keep(&self) {
        let interval = self.ttl.div_f64(RENEWALS_PER_TTL);
        let interval = interval.min(seconds("ETCD_KEEPALIVE_INTERVAL_SECONDS", interval.as_secs_f64()));
        let (mut delay, mut is_lost) = (FIRST_DELAY, false);
        let mut wanted = lock(&self.wanted);
        while !wanted.is_closed {
            drop(wanted);
            let pause = match self.renew() {
                Ok(()) => {
                    if std::mem::take(&mut is_lost) {
                        tracing::info!("etcd is back");
                    }
                    delay = FIRST_DELAY;
                    interval
                }
                Err(failure) => {
                    if !std::mem::replace(&mut is_lost, true) {
                        tracing::warn!("lost etcd ({failure}); requests go on, and this process tries again");
                    }
                    let pause = delay;
                    delay = (delay * 2).min(LONGEST_DELAY);
                    pause
                }
            };
            wanted = lock(&self.wanted);
            if !wanted.is_closed {
                wanted = self.closed.wait_timeout(wanted, pause).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    fn renew(&self) -> Result<(), Failure> {
        if self.client.keep_alive(self.lease_id)? == 0 {
            self.take_again()?;
        }
        let attached = self.client.leased_keys(self.lease_id)?;
        let (missing, unwanted) = {
            let wanted = lock(&self.wanted);
            let missing: Vec<(String, String)> = wanted
                .records
                .iter()
                .filter(|(key, _)| !attached.contains(&encode(key.as_bytes())))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect();
            (missing, wanted.unwanted.clone())
        };
        for key in unwanted {
            self.client.delete(&key)?;
            lock(&self.wanted).unwanted.remove(&key);
        }
        for (key, value) in missing {
            tracing::info!("putting {key} into etcd again");
            self.write(&key, &value)?;
            let is_wanted = lock(&self.wanted).records.contains_key(&key);
            if !is_wanted {
                self.client.delete(&key)?; // it was deleted while it was written
            }
        }
        Ok(())
    }
}

fn unreachable(key: &str, failure: &Failure) -> DynamoError {
    DynamoError::top(ErrorType::CannotConnect, format!("etcd could not be told of {key}: {failure}"))
}

impl Discovery for EtcdStore {
    fn put(&self, key: &str, value: &str) -> Result<(), DynamoError> {
        self.shared.write(key, value).map_err(|failure| {
            // It may have come through all the same.
            lock(&self.shared.wanted).unwanted.insert(key.to_owned());
            unreachable(key, &failure)
        })?;
        let mut wanted = lock(&self.shared.wanted);
        wanted.unwanted.remove(key);
        wanted.records.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    fn delete(&self, key: &str) -> Result<(), DynamoError> {
        lock(&self.shared.wanted).records.remove(key);
        self.shared.client.delete(key).map_err(|failure| {
            lock(&self.shared.wanted).unwanted.insert(key.to_owned());
            unreachable(key, &failure)
        })
    }

    fn close(&self) {
        lock(&self.shared.wanted).is_closed = true;
        self.shared.closed.notify_all();
        if let Some(keeper) = lock(&self.keeper).take() {
            // It returns after the request that it has under way; one that panicked has nothing left to do.
            let _ = keeper.join();
        }
        if let Err(failure) = self.shared.client.revoke(self.shared.lease_id, CLOSE_PATIENCE) {
            let ttl = self.shared.ttl.as_secs();
            tracing::warn!(
                "etcd could not be told that this process leaves ({failure}); its records run out within {ttl} s"
            );
        }
    }

    fn default_host(&self) -> &'static str {
        "0.0.0.0"
    }
}
