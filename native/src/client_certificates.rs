//! Certificates of clients. OpenSSL decides whether a certificate is trusted (`transport/client_certificates.py`). This verifies
//! that the client has its key.

use std::sync::{Arc, LazyLock};

use p521::ecdsa::signature::hazmat::PrehashVerifier;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::{
    AlgorithmIdentifier, CertificateDer, InvalidSignature, SignatureVerificationAlgorithm, SubjectPublicKeyInfoDer,
    UnixTime, alg_id,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, PeerMisbehaved, SignatureScheme,
};
use sha2::{Digest, Sha256, Sha384, Sha512};
use webpki::RawPublicKeyEntity;

const SEQUENCE: u8 = 0x30;
/// The version of a certificate, which version 1 leaves out.
const VERSION: u8 = 0xa0;
/// Serial number, algorithm, issuer, validity and subject precede the key.
const BEFORE_KEY: usize = 5;

/// ring's, and those that ring does not have and OpenSSL accepts. In TLS 1.3 the first of a scheme is used.
static ALGORITHMS: LazyLock<WebPkiSupportedAlgorithms> = LazyLock::new(|| {
    let ring = ring::default_provider().signature_verification_algorithms;
    let mut mapping = ring.mapping.to_vec();
    for (scheme, algorithms) in &mut mapping {
        match *scheme {
            SignatureScheme::ECDSA_NISTP256_SHA256 => *algorithms = [*algorithms, &[&P521Sha256]].concat().leak(),
            SignatureScheme::ECDSA_NISTP384_SHA384 => *algorithms = [*algorithms, &[&P521Sha384]].concat().leak(),
            _ => (),
        }
    }
    mapping.push((SignatureScheme::ECDSA_NISTP521_SHA512, &[&P521Sha512, &P384Sha512, &P256Sha512]));
    WebPkiSupportedAlgorithms { all: ring.all, mapping: mapping.leak() }
});

/// `verify` gets the certificates, DER, and returns None or the alert for the client.
#[derive(Debug)]
pub struct ByOpenssl {
    pub mandatory: bool,
    pub verify: Py<PyAny>,
}

impl ClientCertVerifier for ByOpenssl {
    fn client_auth_mandatory(&self) -> bool {
        self.mandatory
    }

    /// None, like OpenSSL: a client sends the certificate that it has.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let refused = Python::attach(|py| {
            let mut all = vec![PyBytes::new(py, end_entity)];
            all.extend(intermediates.iter().map(|each| PyBytes::new(py, each)));
            self.verify.call1(py, (all,))?.extract::<Option<u8>>(py)
        });
        match refused {
            Ok(None) => Ok(ClientCertVerified::assertion()),
            Ok(Some(alert)) => Err(with_alert(alert).into()),
            Err(error) => Err(Error::General(error.to_string())),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify(message, certificate, signed, algorithms(signed.scheme))
    }

    /// The scheme states the curve, and the first algorithm has it.
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let is_older = matches!(
            signed.scheme,
            SignatureScheme::RSA_PKCS1_SHA256 | SignatureScheme::RSA_PKCS1_SHA384 | SignatureScheme::RSA_PKCS1_SHA512
        );
        let found = if is_older { &[] } else { algorithms(signed.scheme) };
        verify(message, certificate, signed, &found[..found.len().min(1)])
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ALGORITHMS.supported_schemes()
    }
}

fn algorithms(scheme: SignatureScheme) -> &'static [&'static dyn SignatureVerificationAlgorithm] {
    ALGORITHMS.mapping.iter().find(|(each, _)| *each == scheme).map_or(&[], |(_, found)| found)
}

fn verify(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
    algorithms: &[&dyn SignatureVerificationAlgorithm],
) -> Result<HandshakeSignatureValid, Error> {
    if algorithms.is_empty() {
        return Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into());
    }
    let key = SubjectPublicKeyInfoDer::from(public_key(certificate).ok_or(CertificateError::BadEncoding)?);
    let key = RawPublicKeyEntity::try_from(&key).map_err(|_| CertificateError::BadEncoding)?;
    for each in algorithms {
        match key.verify_signature(*each, message, signed.signature()) {
            Ok(()) => return Ok(HandshakeSignatureValid::assertion()),
            Err(webpki::Error::UnsupportedSignatureAlgorithmForPublicKeyContext(_)) => (),
            Err(_) => return Err(CertificateError::BadSignature.into()),
        }
    }
    Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into())
}

/// SubjectPublicKeyInfo of a certificate, also of version 1, which webpki does not read.
fn public_key(certificate: &[u8]) -> Option<&[u8]> {
    let (_, certificate, _) = element(certificate).filter(|(kind, ..)| *kind == SEQUENCE)?;
    let (_, mut rest, _) = element(certificate).filter(|(kind, ..)| *kind == SEQUENCE)?;
    if *rest.first()? == VERSION {
        (_, _, rest) = element(rest)?;
    }
    for _ in 0..BEFORE_KEY {
        (_, _, rest) = element(rest)?;
    }
    let (kind, _, after) = element(rest)?;
    (kind == SEQUENCE).then(|| &rest[..rest.len() - after.len()])
}

/// The first element of DER: its kind, its content, and what follows it.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[kind, first], rest) = der.split_first_chunk::<2>()?;
    let (byte_count, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x83 => {
            let (length, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (length.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(byte_count)?;
    Some((kind, content, rest))
}

/// The error for which rustls sends that alert, or certificate_unknown.
fn with_alert(alert: u8) -> CertificateError {
    match alert {
        42 => CertificateError::BadEncoding,
        43 => CertificateError::InvalidPurpose,
        44 => CertificateError::Revoked,
        45 => CertificateError::Expired,
        48 => CertificateError::UnknownIssuer,
        51 => CertificateError::BadSignature,
        _ => CertificateError::Other(OtherError(Arc::new(std::io::Error::other("refused by OpenSSL")))),
    }
}

macro_rules! ecdsa {
    ($name:ident, $curve:ident, $key:ident, $hash:ident, $digest:ident) => {
        #[derive(Debug)]
        struct $name;

        impl SignatureVerificationAlgorithm for $name {
            fn verify_signature(&self, key: &[u8], message: &[u8], signature: &[u8]) -> Result<(), InvalidSignature> {
                let key = $curve::ecdsa::VerifyingKey::from_sec1_bytes(key).map_err(|_| InvalidSignature)?;
                let signature = $curve::ecdsa::Signature::from_der(signature).map_err(|_| InvalidSignature)?;
                key.verify_prehash(&$hash::digest(message), &signature).map_err(|_| InvalidSignature)
            }

            fn public_key_alg_id(&self) -> AlgorithmIdentifier {
                alg_id::$key
            }

            fn signature_alg_id(&self) -> AlgorithmIdentifier {
                alg_id::$digest
            }
        }
    };
}

ecdsa!(P256Sha512, p256, ECDSA_P256, Sha512, ECDSA_SHA512);
ecdsa!(P384Sha512, p384, ECDSA_P384, Sha512, ECDSA_SHA512);
ecdsa!(P521Sha256, p521, ECDSA_P521, Sha256, ECDSA_SHA256);
ecdsa!(P521Sha384, p521, ECDSA_P521, Sha384, ECDSA_SHA384);
ecdsa!(P521Sha512, p521, ECDSA_P521, Sha512, ECDSA_SHA512);
