//! A streaming answer that settles for the tokens that were sent, also when the client hangs up in
//! the middle.
//!
//!     cargo run --release -p zae-limiter --example streaming

use tokio::sync::mpsc;
use zae_limiter::{Error, Lease, Limit, RateLimiter};

/// The estimate: the longest answer there is.
const ESTIMATE: u64 = 100;

/// Counts what is sent. Whatever ends the stream, the end of the answer or a client that has gone,
/// the rest of the estimate is given back.
struct Metered {
    lease: Lease,
    sent: u64,
}

impl Metered {
    async fn send(&mut self, to: &mpsc::Sender<String>, word: String) -> Result<(), ClientGone> {
        to.send(word).await.map_err(|_| ClientGone)?;
        self.sent += 1;
        Ok(())
    }

    async fn finish(mut self) -> Result<u64, Error> {
        self.lease.settle("tpm", self.sent)?;
        self.lease.commit().await?;
        Ok(self.sent)
    }
}

struct ClientGone;

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
    limiter.set_system_defaults([Limit::per_hour("tpm", 1_000)], None).await?;

    for (client, patience) in [("reads to the end", usize::MAX), ("hangs up after 7 words", 7)] {
        let (to, mut from) = mpsc::channel(1);
        let answer = tokio::spawn(stream_answer(limiter.clone(), to));
        let mut heard = 0;
        while heard < patience && from.recv().await.is_some() {
            heard += 1;
        }
        drop(from);
        let sent = answer.await.expect("no panic")?;
        let left = limiter.available("key-1", "gpt-4", &[]).await?[0].available;
        println!("a client that {client}: {sent} of {ESTIMATE} tokens kept, {left} left");
    }
    Ok(())
}
