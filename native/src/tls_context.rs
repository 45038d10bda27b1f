//! Certificates, keys and versions of TLS connections. What rustls does not support raises ValueError: Python has TLS then.

use std::sync::{Arc, LazyLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection};
use rustls::version::TLS13;
use rustls::{CipherSuiteCommon, ClientConfig, RootCertStore, ServerConfig, SupportedCipherSuite};
use rustls::{SupportedProtocolVersion, Tls12CipherSuite, Tls13CipherSuite};

use crate::client_certificates::ByOpenssl;
use crate::tls::{Session, Tls};

#[pyclass(module = "fencepost_native", frozen)]
pub struct TlsContext(Config);

enum Config {
    Server(Arc<ServerConfig>),
    Client(Arc<ClientConfig>),
}

#[pymethods]
impl TlsContext {
    /// Of a listener. `certificates`, `key`: PEM. `clients`: whether their certificates are required, and what verifies
    /// them (`ByOpenssl`). Then no session is resumed: each connection's certificate is verified.
    #[staticmethod]
    #[pyo3(signature = (certificates, key, min_version, clients))]
    fn listener(
        certificates: &[u8],
        key: &[u8],
        min_version: &str,
        clients: Option<(bool, Py<PyAny>)>,
    ) -> PyResult<Self> {
        let (certificates_der, key) = certificates_and_key(certificates, key)?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(versions(min_version))
            .map_err(unsupported)?;
        let verifies_clients = clients.is_some();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some((mandatory, verify)) => builder.with_client_cert_verifier(Arc::new(ByOpenssl { mandatory, verify })),
        };
        let mut config = builder.with_single_cert(certificates_der, key).map_err(unsupported)?;
        config.ignore_client_order = true;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        if !verifies_clients {
            config.ticketer = ring::Ticketer::new().map_err(unsupported)?;
        }
        Ok(TlsContext(Config::Server(Arc::new(config))))
    }

    /// Of connections to brokers. `trusted`: DER. `identity`: certificates and key, PEM.
    #[staticmethod]
    #[pyo3(signature = (trusted, identity, min_version))]
    fn upstream(trusted: Vec<Vec<u8>>, identity: Option<(Vec<u8>, Vec<u8>)>, min_version: &str) -> PyResult<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in trusted {
            roots.add(CertificateDer::from(certificate)).map_err(unsupported)?;
        }
        if roots.is_empty() {
            return Err(PyValueError::new_err("no trusted certificates"));
        }
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(versions(min_version))
            .map_err(unsupported)?
            .with_root_certificates(roots);
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some((certificates, key)) => {
                let (certificates_der, key) = certificates_and_key(&certificates, &key)?;
                builder.with_client_auth_cert(certificates_der, key).map_err(unsupported)?
            }
        };
        config.resumption = Resumption::disabled();
        Ok(TlsContext(Config::Client(Arc::new(config))))
    }

    /// `server_name`: expected name of the peer, for an upstream connection.
    #[pyo3(signature = (server_name))]
    fn connection(&self, server_name: Option<&str>) -> PyResult<Tls> {
        let session = match (&self.0, server_name) {
            (Config::Server(config), _) => {
                Session::Server(Box::new(UnbufferedServerConnection::new(config.clone()).map_err(unsupported)?))
            }
            (Config::Client(config), name) => {
                let name = ServerName::try_from(name.unwrap_or_default().to_owned()).map_err(unsupported)?;
                Session::Client(Box::new(UnbufferedClientConnection::new(config.clone(), name).map_err(unsupported)?))
            }
        };
        Ok(Tls::new(session))
    }
}

/// Ring's, without limits in records: `Tls` updates keys by bytes. TLS 1.2 has no key update, so a connection would end
/// after 2^24 records, however small, where OpenSSL and Java go on.
fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let mut provider = ring::default_provider();
        provider.cipher_suites = provider.cipher_suites.into_iter().map(without_limit).collect();
        Arc::new(provider)
    });
    PROVIDER.clone()
}

/// Never freed: rustls keeps suites for as long as the process runs.
fn without_limit(suite: SupportedCipherSuite) -> SupportedCipherSuite {
    let unlimited = |common: &CipherSuiteCommon| CipherSuiteCommon {
        suite: common.suite,
        hash_provider: common.hash_provider,
        confidentiality_limit: u64::MAX,
    };
    match suite {
        SupportedCipherSuite::Tls12(suite) => SupportedCipherSuite::Tls12(Box::leak(Box::new(Tls12CipherSuite {
            common: unlimited(&suite.common),
            prf_provider: suite.prf_provider,
            kx: suite.kx,
            sign: suite.sign,
            aead_alg: suite.aead_alg,
        }))),
        SupportedCipherSuite::Tls13(suite) => SupportedCipherSuite::Tls13(Box::leak(Box::new(Tls13CipherSuite {
            common: unlimited(&suite.common),
            hkdf_provider: suite.hkdf_provider,
            aead_alg: suite.aead_alg,
            quic: suite.quic,
        }))),
    }
}

fn versions(min_version: &str) -> &'static [&'static SupportedProtocolVersion] {
    static NEWEST: [&SupportedProtocolVersion; 1] = [&TLS13];
    if min_version == "1.3" { &NEWEST } else { rustls::DEFAULT_VERSIONS }
}

fn certificates_and_key(
    certificates: &[u8],
    key: &[u8],
) -> PyResult<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let certificates_der =
        CertificateDer::pem_slice_iter(certificates).collect::<Result<Vec<_>, _>>().map_err(unsupported)?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(unsupported)?;
    Ok((certificates_der, key))
}

fn unsupported(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}
