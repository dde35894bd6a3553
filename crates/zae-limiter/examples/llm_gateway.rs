//! An LLM gateway: it estimates the tokens of a call, takes them up front, and settles for the tokens
//! that the model used.
//!
//!     cargo run --release -p zae-limiter --example llm_gateway
//!
//! Run it in two terminals with the same file, and both share their limits:
//!
//!     cargo run --release -p zae-limiter --example llm_gateway -- sqlite:limits.db

use zae_limiter::{Error, Lease, Limit, RateLimiter};

/// A model that answers with as many tokens as the prompt has letters. It fails on an empty one.
async fn call_model(prompt: &str) -> Result<u64, ModelError> {
    if prompt.is_empty() {
        return Err(ModelError::Failed("the prompt is empty".to_owned()));
    }
    Ok(prompt.len() as u64)
}

/// One call of a client: a request, and an estimate of 40 tokens.
async fn complete(limiter: &RateLimiter, key: &str, prompt: &str) -> Result<u64, ModelError> {
    let acquire = limiter.acquire(key, "gpt-4").take("rpm", 1).take("tpm", 40);
    acquire
        .run(async |lease: &mut Lease| {
            let used = call_model(prompt).await?;
            // The commit writes the difference to the estimate. It never fails for lack of tokens: the
            // bucket may go into debt, and refills from there.
            lease.settle("tpm", used)?;
            Ok(used)
        })
        .await
}

#[derive(Debug)]
enum ModelError {
    Limited(Error),
    Failed(String),
}

impl From<Error> for ModelError {
    fn from(error: Error) -> Self {
        Self::Limited(error)
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let url = std::env::args()
        .nth(1)
        .unwrap_or_else(|| format!("sqlite:{}", folder.path().join("limits.db").display()));
    let limiter = zae_limiter::open(&url).await?;
    println!("limits are kept in {url}\n");

    let limits = [Limit::per_minute("rpm", 6), Limit::per_minute("tpm", 200).burst(300)];
    limiter.ensure_resource_defaults("gpt-4", limits).await?;

    let long = "tell me everything about it, ".repeat(8);
    let prompts = ["hello", "a somewhat longer question", "", long.as_str(), "hello again", "and?"];
    for prompt in prompts {
        match complete(&limiter, "key-1", prompt).await {
            Ok(used) => println!("answered: {used} tokens"),
            Err(ModelError::Failed(why)) => println!("failed:   {why}; all tokens refunded"),
            Err(ModelError::Limited(Error::Exceeded(refusal))) => println!("refused:  {refusal}"),
            Err(ModelError::Limited(other)) => return Err(other),
        }
        for status in limiter.available("key-1", "gpt-4", &[]).await? {
            let (left, capacity) = (status.available, status.rate.capacity());
            println!("          {}: {left} of {capacity} left", status.limit_name);
        }
    }

    let usage = limiter.usage().entity("key-1").summary().await?;
    println!("\nused in all: {:?}", usage.consumed);
    Ok(())
}
