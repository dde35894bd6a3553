use std::sync::{Mutex, PoisonError};

use ulid::Ulid;
use zae_limiter_model::{NamespaceId, Timestamp};

/// The source of random ids, a parameter like the clock, so that a run with a seed can be replayed.
#[derive(Debug)]
pub struct Entropy {
    rng: Mutex<fastrand::Rng>,
    /// The last event id: the next one of the same millisecond must sort after it.
    last_event: Mutex<Option<Ulid>>,
}

impl Entropy {
    /// Seeded by the operating system.
    ///
    /// # Panics
    ///
    /// When the operating system provides no random numbers.
    #[expect(clippy::disallowed_methods, reason = "this is the injected source of randomness")]
    pub fn from_os() -> Self {
        // Without it, ids could repeat from one process to the next, and two namespaces could share one
        // id. No caller can handle that.
        Self::seeded(getrandom::u64().expect("the operating system provides random numbers"))
    }

    /// Returns the same ids in the same order for the same seed.
    pub fn seeded(seed: u64) -> Self {
        let rng = Mutex::new(fastrand::Rng::with_seed(seed));
        Self { rng, last_event: Mutex::default() }
    }

    fn draw<T>(&self, from: impl FnOnce(&mut fastrand::Rng) -> T) -> T {
        from(&mut self.rng.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The id of an audit event: a ULID, which sorts by time, and within a millisecond by the order of the
    /// calls.
    pub fn event_id(&self, at: Timestamp) -> String {
        let millis = u64::try_from(at.as_millis()).unwrap_or(0);
        let fresh = Ulid::from_parts(millis, self.draw(|rng| rng.u128(..)));
        let mut last = self.last_event.lock().unwrap_or_else(PoisonError::into_inner);
        let after_last = last
            .filter(|last| last.timestamp_ms() == fresh.timestamp_ms())
            .and_then(|last| last.increment().ok());
        last.insert(after_last.unwrap_or(fresh)).to_string()
    }

    /// The id of a new namespace: 64 random bits in eleven URL-safe characters.
    pub(crate) fn namespace_id(&self) -> NamespaceId {
        const ALPHABET: &[u8; 64] =
            b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-";
        let text: String = self.draw(|rng| {
            (0..11)
                .map(|at| {
                    // A leading dash would read as an option on a command line.
                    let choices = if at == 0 { 63 } else { 64 };
                    char::from(ALPHABET[rng.usize(..choices)])
                })
                .collect()
        });
        NamespaceId::new(text).expect("made of the right characters")
    }
}
