//! Keys under projects under an organisation: one call takes from all of them, or from none.
//!
//!     cargo run --release -p zae-limiter --example hierarchy

use zae_limiter::{Error, Limit};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let url = format!("sqlite:{}", folder.path().join("limits.db").display());
    let limiter = zae_limiter::open(&url).await?;

    limiter.ensure_entity("acme").name("Acme Inc.").await?;
    limiter.ensure_entity("search").parent("acme").cascade().await?;
    limiter.ensure_entity("chat").parent("acme").cascade().await?;
    for (key, project) in [("key-1", "search"), ("key-2", "search"), ("key-3", "chat")] {
        limiter.ensure_entity(key).parent(project).cascade().await?;
    }

    // Buckets of 5 requests for every key, 8 for a project, 11 for the organisation; each refills within a day.
    limiter.ensure_system_defaults([Limit::per_day("rpd", 5)], None).await?;
    limiter.ensure_limits("search", None, [Limit::per_day("rpd", 8)]).await?;
    limiter.ensure_limits("chat", None, [Limit::per_day("rpd", 8)]).await?;
    limiter.ensure_limits("acme", None, [Limit::per_day("rpd", 11)]).await?;

    for key in ["key-1", "key-2", "key-3"] {
        let mut admitted = 0;
        let refusal = loop {
            match limiter.acquire(key, "api").take("rpd", 1).await {
                Ok(lease) => {
                    lease.commit().await?;
                    admitted += 1;
                }
                Err(Error::Exceeded(refusal)) => break refusal,
                Err(other) => return Err(other),
            }
        };
        println!("{key}: {admitted} admitted, then:");
        for status in refusal.statuses() {
            let verdict = if status.exceeded { "exceeded" } else { "fits" };
            println!("    {:8} {} left, {verdict}", status.entity_id.as_str(), status.available);
        }
    }
    Ok(())
}
