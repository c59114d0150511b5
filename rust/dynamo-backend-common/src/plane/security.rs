//! Who may call this worker and whom it calls: TLS, mutual TLS and the shared secret, from settings to what the wires use.

use std::path::PathBuf;

use crate::error::DynamoError;
use crate::settings::{self, ListenerSettings};
use crate::tls::{self, CallerTls, ListenerTls, TlsAcceptor, TlsConnector, TlsFile, TlsProvider};
use crate::wire::secret::SharedSecret;

const CERT: &str = "DYN_TCP_TLS_CERT_PATH";
const KEY: &str = "DYN_TCP_TLS_KEY_PATH";
const CA: &str = "DYN_TCP_TLS_CA_CERT_PATH";
const CLIENT_CA: &str = "DYN_TCP_TLS_CLIENT_CA_CERT_PATH";
const CLIENT_CERT: &str = "DYN_TCP_TLS_CLIENT_CERT_PATH";
const CLIENT_KEY: &str = "DYN_TCP_TLS_CLIENT_KEY_PATH";
const INSECURE: &str = "DYN_TCP_TLS_INSECURE";
const SERVER_NAME: &str = "DYN_TCP_TLS_SERVER_NAME";

/// `None` means off.
#[derive(Default)]
pub(crate) struct Security {
    pub(crate) acceptor: Option<Box<dyn TlsAcceptor>>,
    pub(crate) connector: Option<Box<dyn TlsConnector>>,
    pub(crate) secret: Option<SharedSecret>,
    /// The TLS of the listener already identifies the caller.
    pub(crate) knows_callers: bool,
}

/// What the environment asks for.
#[derive(Debug, Default, PartialEq)]
struct Asked {
    listener: Option<ListenerTls>,
    caller: Option<CallerTls>,
    /// One of the variables that are set.
    named: Option<&'static str>,
}

impl Security {
    /// Reads the files. Fails, naming the variable, for what cannot be used.
    pub(crate) fn new(settings: &ListenerSettings) -> Result<Self, DynamoError> {
        let secret = settings.secret_path.as_deref().map(SharedSecret::read).transpose()?;
        let asked = Asked::read(settings::text, settings::switch(INSECURE, false))?;
        let Some(named) = asked.named else { return Ok(Self { secret, ..Self::default() }) };
        let provider = provider(named)?;
        let knows_callers = asked.listener.as_ref().is_some_and(|listener| listener.client_authority.is_some());
        let acceptor = asked.listener.map(|listener| provider.acceptor(listener)).transpose()?;
        let connector = asked.caller.map(|caller| provider.connector(caller)).transpose()?;
        Ok(Self { acceptor, connector, secret, knows_callers })
    }

    /// Refuses settings of TLS that this program cannot keep to, before anything is touched.
    pub(crate) fn check() -> Result<(), DynamoError> {
        let asked = Asked::read(settings::text, settings::switch(INSECURE, false))?;
        asked.named.map_or(Ok(()), |named| provider(named).map(drop))
    }
}

pub(crate) fn provider(named: &str) -> Result<&'static dyn TlsProvider, DynamoError> {
    tls::provider().ok_or_else(|| {
        DynamoError::invalid(format!(
            "{named} is set, and this program has no TLS: build it with the crate dynamo-backend-tls, whose install() its main \
             calls first, or unset {named}"
        ))
    })
}

impl Asked {
    fn read(text: impl Fn(&str) -> Option<String>, is_insecure: bool) -> Result<Self, DynamoError> {
        let file = |setting| text(setting).map(|path| TlsFile { setting, path: PathBuf::from(path) });
        let pair = |certificate: &'static str, key: &'static str| match (file(certificate), file(key)) {
            (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
            (None, None) => Ok(None),
            _ => Err(DynamoError::invalid(format!("{certificate} and {key} need each other"))),
        };
        let (own, shown) = (pair(CERT, KEY)?, pair(CLIENT_CERT, CLIENT_KEY)?);
        let (authority, client_authority) = (file(CA), file(CLIENT_CA));
        let listener = match (own, client_authority) {
            (Some((certificate, key)), client_authority) => Some(ListenerTls { certificate, key, client_authority }),
            (None, Some(_)) => {
                let text = format!("{CLIENT_CA} asks callers for certificates, which needs {CERT} and {KEY}");
                return Err(DynamoError::invalid(text));
            }
            (None, None) => None,
        };
        let caller = CallerTls { authority, certificate: shown, server_name: text(SERVER_NAME), is_insecure };
        let caller = (caller != CallerTls::default()).then_some(caller);
        let named = [CERT, CA, CLIENT_CERT, SERVER_NAME].into_iter().find(|name| text(name).is_some());
        Ok(Self { listener, caller, named: named.or(is_insecure.then_some(INSECURE)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(set: &[&str]) -> Result<Asked, String> {
        let text = |name: &str| set.contains(&name).then(|| format!("/{name}"));
        Asked::read(text, set.contains(&INSECURE)).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_name_what_they_need() {
        assert_eq!(asked(&[]), Ok(Asked::default()));
        assert!(asked(&[CERT]).is_err_and(|why| why.contains("need each other")));
        assert!(asked(&[CLIENT_KEY]).is_err_and(|why| why.contains(CLIENT_CERT)));
        assert!(asked(&[CLIENT_CA]).is_err_and(|why| why.contains("asks callers")));
        let both = asked(&[CERT, KEY, CLIENT_CA, CA]).expect("settings");
        assert!(both.listener.is_some_and(|listener| listener.client_authority.is_some()));
        assert!(both.caller.is_some_and(|caller| !caller.is_insecure));
        for name in [CA, SERVER_NAME, INSECURE] {
            let asked = asked(&[name]).expect("settings");
            assert_eq!((asked.named, asked.listener, asked.caller.is_some()), (Some(name), None, true));
        }
    }
}
