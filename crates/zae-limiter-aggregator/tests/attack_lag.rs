//! Promise (docs/namespaces.md, docs/aggregator.md): a purge removes everything, and usage of a purged namespace stays
//! removed. Here the table's index lags by half a second, as DynamoDB's do, and an aggregator has booked a moment ago.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::play::play;
use zae_limiter_core::{Clock, NamespaceId, RateLimiter};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::{ClientClock, Faults};

const LAG_US: u64 = 500_000;

#[test]
fn a_purge_right_after_a_booking_leaves_no_usage() {
    play(async move |mut play| {
        let world = Arc::clone(&play.world);
        let table = Arc::new(world.table.for_client(90));
        let store = DynamoStore::new(table, DynamoOptions::default().seed(90));
        let clock: Arc<dyn Clock> = Arc::new(ClientClock::new(Arc::clone(&world.time), 0, 0, 0));
        let limiter = RateLimiter::builder(store).clock(clock).open().await.unwrap();
        let namespaces = limiter.namespaces();
        let id: NamespaceId = namespaces.register("team").await.unwrap().id;
        world.table.set_faults(Faults { delay_us: 500..=8_000, lag_us: LAG_US, ..Faults::none() });
        play.stream.split(None, "1");
        play.change("1", "key", 3);
        // The changes are those of the namespace that is purged.
        for record in &mut play.stream.inside().shards.get_mut("1").unwrap().records {
            let text = record.to_string().replace("abcdefghijk", id.as_str());
            *record = serde_json::from_str(&text).unwrap();
        }
        play.invoke("1", 0..3).await;
        namespaces.delete("team").await.unwrap();
        namespaces.purge(&id, |_| {}).await.unwrap();
        world.time.sleep(Duration::from_micros(2 * LAG_US)).await;
        let of_team = |item: &zae_limiter_schema::Item| {
            let text = |name: &str| item[name].as_str().unwrap().to_owned();
            text("PK").contains(id.as_str()) && text("SK").contains("USAGE")
        };
        let left = world.table.items().iter().filter(|item| of_team(item)).count();
        assert_eq!(left, 0, "usage records of a purged namespace are left");
    });
}
