//! A streaming answer that settles for the tokens that were sent, also when the client disconnects
//! early.
//!
//!     cargo run --release -p zae-limiter --example streaming

use tokio::sync::mpsc;
use zae_limiter::{Error, Lease, Limit, RateLimiter};

/// The estimate: the longest possible answer, in tokens.
const ESTIMATE: u64 = 100;

/// Counts the tokens that were sent. When the stream ends, by its last token or because the client
/// disconnected, the rest of the estimate is refunded.
struct Metered {
    lease: Lease,
    sent: u64,
}

impl Metered {
    async fn send(&mut self, to: &mpsc::Sender<String>, word: String) -> Result<(), Disconnected> {
        to.send(word).await.map_err(|_| Disconnected)?;
        self.sent += 1;
        Ok(())
    }

    async fn finish(mut self) -> Result<u64, Error> {
        self.lease.settle("tpm", self.sent)?;
        self.lease.commit().await?;
        Ok(self.sent)
    }
}

struct Disconnected;

async fn stream_answer(limiter: RateLimiter, to: mpsc::Sender<String>) -> Result<u64, Error> {
    let lease = limiter.acquire("key-1", "gpt-4").take("tpm", ESTIMATE).await?;
    let mut answer = Metered { lease, sent: 0 };
    for word in 0..60 {
        if answer.send(&to, format!("word-{word}")).await.is_err() {
            break;
        }
    }
    answer.finish().await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let url = format!("sqlite:{}", folder.path().join("limits.db").display());
    let limiter = zae_limiter::open(&url).await?;
    limiter.ensure_system_defaults([Limit::per_hour("tpm", 1_000)], None).await?;

    for (client, words_max) in [("reads to the end", usize::MAX), ("disconnects after 7 words", 7)]
    {
        let (to, mut from) = mpsc::channel(1);
        let answer = tokio::spawn(stream_answer(limiter.clone(), to));
        let mut heard = 0;
        while heard < words_max && from.recv().await.is_some() {
            heard += 1;
        }
        drop(from);
        let sent = answer.await.expect("no panic")?;
        let left = limiter.available("key-1", "gpt-4", &[]).await?[0].available;
        println!("a client that {client}: {sent} of {ESTIMATE} tokens kept, {left} left");
    }
    Ok(())
}
