//! x
pub use zae_limiter_core::*;
