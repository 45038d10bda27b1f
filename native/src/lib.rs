//! The hot path of the proxy: frames that are relayed, and appends that permits allow. Python decides everything else.
//! And that of the Spark sink (`encoding`).

mod appends;
mod arriving;
mod batch;
mod bytes;
mod client_certificates;
mod collecting;
mod connection;
mod encoding;
mod fetch;
mod frame;
mod framing;
mod layouts;
mod memory;
mod methods;
mod output;
mod passing;
mod permit;
mod process_state;
mod produce;
mod pump;
mod request_template;
mod requests;
mod responses;
mod settings;
mod splicing;
mod tls;
mod tls_context;
mod topic;
mod upward;

use pyo3::prelude::*;

/// What Python's allocator guarantees; PyO3 does not check it.
const ALIGNMENT_MAX: usize = 16;
const _: () = assert!(align_of::<settings::Settings>() <= ALIGNMENT_MAX);
const _: () = assert!(align_of::<connection::Connection>() <= ALIGNMENT_MAX);
const _: () = assert!(align_of::<permit::Permit>() <= ALIGNMENT_MAX);
const _: () = assert!(align_of::<request_template::RequestTemplate>() <= ALIGNMENT_MAX);
const _: () = assert!(align_of::<tls::Tls>() <= ALIGNMENT_MAX);
const _: () = assert!(align_of::<tls_context::TlsContext>() <= ALIGNMENT_MAX);

#[pymodule]
mod fencepost_native {
    /// `proxy/fencepost_proxy/executor.py` accepts no other number: both change together.
    #[pymodule_export]
    const INTERFACE: u32 = 14;
    /// `client/fencepost/spark/native.py` accepts no other number.
    #[pymodule_export]
    const ENCODING_INTERFACE: u32 = 2;
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::bytes::crc32c_of;
    #[pymodule_export]
    use crate::connection::Connection;
    #[pymodule_export]
    use crate::encoding::{batch, bodies, hash_sum, java_partitions};
    #[pymodule_export]
    use crate::layouts::element_ends;
    #[pymodule_export]
    use crate::memory::MemoryBudget;
    #[pymodule_export]
    use crate::permit::Permit;
    #[pymodule_export]
    use crate::process_state::changed;
    #[pymodule_export]
    use crate::request_template::RequestTemplate;
    #[pymodule_export]
    use crate::settings::{Settings, Shared};
    #[pymodule_export]
    use crate::tls::Tls;
    #[pymodule_export]
    use crate::tls_context::TlsContext;
    #[pymodule_export]
    use crate::topic::TopicSettings;
}
