//! Where a worker may bring the answer of a native request: to the caller's own machine, unless an operator allows more.
//!
//! The native wire names the address in the request. Without a check anybody who reaches a worker could make it connect to
//! any host and port that the worker reaches.

use std::net::{IpAddr, UdpSocket};
use std::sync::Mutex;

use crate::error::DynamoError;
use crate::plane::lock;

/// The setting that allows further networks.
pub(crate) const SETTING: &str = "DYN_TCP_CALL_HOME_NETWORKS";
const ANYWHERE: &str = "any";

/// Decides by the address of the caller's request connection and the networks that were allowed.
#[derive(Debug)]
pub(crate) struct CallHomePolicy {
    is_anywhere: bool,
    networks: Vec<(IpAddr, u32)>,
    names: Vec<String>,
    is_own: fn(IpAddr) -> bool,
    /// The last pair: a caller sends many requests.
    permitted: Mutex<Option<(String, IpAddr)>>,
}

impl CallHomePolicy {
    /// Reads what is allowed: networks, addresses and host names. Fails, naming the setting, for what is none of these.
    pub(crate) fn new(entries: &[String]) -> Result<Self, DynamoError> {
        let mut policy = Self {
            is_anywhere: false,
            networks: Vec::new(),
            names: Vec::new(),
            is_own: is_own_address,
            permitted: Mutex::default(),
        };
        for entry in entries {
            if entry == ANYWHERE {
                policy.is_anywhere = true;
            } else if let Some(network) = network(entry) {
                policy.networks.push(network);
            } else if entry.contains('/') || !entry.is_ascii() {
                return Err(DynamoError::invalid(format!(
                    "{SETTING}: {entry:?} is neither a network (10.0.0.0/8) nor a host name nor {ANYWHERE:?}"
                )));
            } else {
                policy.names.push(entry.to_ascii_lowercase());
            }
        }
        Ok(policy)
    }

    /// Returns whether an answer may be sent to `host`, of a request that came from `caller`. Without a caller, over NATS,
    /// only the networks that were allowed decide, or nothing where none were.
    pub(crate) fn permits(&self, host: &str, caller: Option<IpAddr>) -> bool {
        let Some(caller) = caller else {
            return (self.networks.is_empty() && self.names.is_empty()) || self.is_allowed(host);
        };
        let is_known = |pair: &(String, IpAddr)| pair.0 == host && pair.1 == caller;
        if lock(&self.permitted).as_ref().is_some_and(is_known) {
            return true;
        }
        let is_permitted = self.check(host, caller.to_canonical());
        if is_permitted {
            *lock(&self.permitted) = Some((host.to_owned(), caller));
        }
        is_permitted
    }

    /// Returns whether an operator allowed this host.
    fn is_allowed(&self, host: &str) -> bool {
        self.is_anywhere
            || self.names.iter().any(|name| host.eq_ignore_ascii_case(name))
            || address(host).is_some_and(|wanted| self.networks.iter().any(|network| contains(*network, wanted)))
    }

    fn check(&self, host: &str, caller: IpAddr) -> bool {
        if self.is_allowed(host) {
            return true;
        }
        let Some(wanted) = address(host) else { return false };
        if wanted == caller {
            return true;
        }
        // A caller on this machine: it may come from 127.0.0.1 and name the address that others know it by.
        (self.is_own)(caller) && (self.is_own)(wanted)
    }
}

/// Reads an IP address, an IPv4 one also where it is wrapped into IPv6; `None` for a name.
fn address(host: &str) -> Option<IpAddr> {
    let plain = host.split_once('%').map_or(host, |(plain, _)| plain);
    plain.parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

fn network(entry: &str) -> Option<(IpAddr, u32)> {
    let (base, length) = entry.split_once('/').map_or((entry, None), |(base, length)| (base, Some(length)));
    let base: IpAddr = base.parse().ok()?;
    let most = if base.is_ipv4() { 32 } else { 128 };
    let length = length.map_or(Some(most), |length| length.parse().ok())?;
    (length <= most).then_some((base, length))
}

fn contains((base, length): (IpAddr, u32), address: IpAddr) -> bool {
    // Both as numbers with the network's bits in front; a shift by the whole width leaves nothing to compare.
    let differs = match (base, address) {
        (IpAddr::V4(base), IpAddr::V4(address)) => {
            (u32::from(base) ^ u32::from(address)).checked_shr(32 - length).unwrap_or(0) != 0
        }
        (IpAddr::V6(base), IpAddr::V6(address)) => {
            (u128::from(base) ^ u128::from(address)).checked_shr(128 - length).unwrap_or(0) != 0
        }
        _ => true,
    };
    !differs
}

/// Returns whether an address is one of this machine: only such an address can be bound.
fn is_own_address(address: IpAddr) -> bool {
    !address.is_unspecified() && UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(entries: &[&str]) -> CallHomePolicy {
        let entries: Vec<String> = entries.iter().map(|entry| (*entry).to_owned()).collect();
        let own = |address: IpAddr| ["127.0.0.1", "10.0.0.5"].contains(&address.to_string().as_str());
        CallHomePolicy { is_own: own, ..CallHomePolicy::new(&entries).expect("a policy") }
    }

    fn permits(policy: &CallHomePolicy, host: &str, caller: &str) -> bool {
        policy.permits(host, Some(caller.parse().expect("an address")))
    }

    #[test]
    fn an_answer_goes_to_the_caller_and_nowhere_else() {
        let plain = policy(&[]);
        assert!(permits(&plain, "10.1.1.1", "10.1.1.1"));
        assert!(permits(&plain, "::ffff:10.1.1.1", "10.1.1.1"));
        assert!(permits(&plain, "10.0.0.5", "127.0.0.1"));
        for (host, caller) in [("10.1.1.2", "10.1.1.1"), ("localhost", "127.0.0.1"), ("10.1.1.1", "127.0.0.1")] {
            assert!(!permits(&plain, host, caller), "{host} {caller}");
        }
    }

    #[test]
    fn an_operator_allows_networks_names_and_everything() {
        let wide = policy(&["10.1.0.0/16", "fd00::/8", "192.168.0.7", "Frontend.example"]);
        for host in ["10.1.255.1", "fd12::1", "192.168.0.7", "frontend.EXAMPLE"] {
            assert!(permits(&wide, host, "172.16.0.1"), "{host}");
        }
        for host in ["10.2.0.1", "fe80::1", "192.168.0.8", "other.example"] {
            assert!(!permits(&wide, host, "172.16.0.1"), "{host}");
        }
        assert!(permits(&policy(&["any"]), "anything.at.all", "172.16.0.1"));
        assert!(permits(&policy(&["0.0.0.0/0"]), "1.2.3.4", "172.16.0.1"));
        assert!(wide.permits("10.1.255.1", None) && !wide.permits("10.2.0.1", None));
        assert!(policy(&[]).permits("10.2.0.1", None));
        for wrong in ["10.0.0.0/33", "10.0.0/8", "fd00::/129", "name/8", "nämé"] {
            assert!(CallHomePolicy::new(&[wrong.to_owned()]).is_err(), "{wrong}");
        }
    }
}
