//! The buckets of an entity, and lists as streams.

use std::pin::{Pin, pin};
use std::task::Poll;

use futures_util::stream::poll_fn;
use zae_limiter::store::StoreErrorKind;
use zae_limiter::{Error, Pages};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{Kind, on_every_store, per_minute, secs, spend, turn, without_refill};

#[test]
fn an_entity_has_a_bucket_for_each_resource_it_called() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        assert!(limiter.buckets("key").unwrap().all().await.unwrap().is_empty());
        spend(&limiter, "key", "gpt-4", "rpm", 10).await;
        spend(&limiter, "key", "gpt-5", "rpm", 20).await;
        spend(&limiter, "other", "gpt-4", "rpm", 30).await;
        let seen = async || {
            let buckets = limiter.buckets("key").unwrap().page_size(1).all().await.unwrap();
            let each = buckets.iter().map(|bucket| {
                let left: Vec<(String, i64)> = bucket
                    .limits
                    .iter()
                    .map(|limit| (limit.limit_name.to_string(), limit.available.whole_tokens()))
                    .collect();
                (bucket.resource.to_string(), left)
            });
            each.collect::<Vec<_>>()
        };
        let rpm = |left| vec![("rpm".to_owned(), left)];
        let expected = [("gpt-4".to_owned(), rpm(50)), ("gpt-5".to_owned(), rpm(40))];
        assert_eq!(seen().await, expected);
        // Balances are as of now, and limits those that hold now.
        world.advance(secs(5));
        assert_eq!(seen().await[0].1, rpm(55));
        limiter.set_limits("key", Some("gpt-5"), [without_refill("tpm", 7)]).await.unwrap();
        assert_eq!(seen().await[1].1, [("tpm".to_owned(), 7)]);
        // Buckets on defaults expire.
        world.advance(secs(3_600));
        let left = seen().await;
        assert_eq!(
            left.iter().map(|(resource, _)| resource.as_str()).collect::<Vec<_>>(),
            ["gpt-5"]
        );
        assert!(matches!(limiter.buckets("a b"), Err(Error::Invalid(_))));
    });
}

async fn next<T: Unpin>(pages: &mut Pages<T>) -> Option<Result<T, Error>> {
    let mut stream = pin!(poll_fn(|context| {
        futures_util::Stream::poll_next(Pin::new(&mut *pages), context)
    }));
    loop {
        if let Poll::Ready(item) =
            crate::world::poll_once(pin!(futures_util::StreamExt::next(&mut stream)).as_mut())
        {
            return item;
        }
        turn().await;
    }
}

#[test]
fn a_list_is_a_stream_of_all_pages() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        for id in ["a", "b", "c", "d", "e"] {
            limiter.create_entity(id).parent("org").await.unwrap();
        }
        let mut pages = limiter.children("org").unwrap().page_size(2);
        let mut ids = Vec::new();
        while let Some(child) = next(&mut pages).await {
            ids.push(child.unwrap().id.to_string());
        }
        assert_eq!(ids, ["a", "b", "c", "d", "e"]);
        assert!(next(&mut pages).await.is_none(), "it stays at its end");
        // What the stream has read and not returned comes first.
        let mut pages = limiter.children("org").unwrap().page_size(3);
        assert_eq!(next(&mut pages).await.unwrap().unwrap().id.as_str(), "a");
        let page = pages.next_page().await.unwrap().unwrap();
        assert_eq!(page.iter().map(|child| child.id.as_str()).collect::<Vec<_>>(), ["b", "c"]);
        assert_eq!(pages.next_page().await.unwrap().unwrap().len(), 2);
        assert!(pages.next_page().await.unwrap().is_none());
    });
}

#[test]
fn a_stream_ends_after_an_error_and_the_page_can_be_read_again() {
    crate::world::on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        limiter.create_entity("a").parent("org").await.unwrap();
        let mut pages = limiter.children("org").unwrap();
        world.store.script(Call::List, Fault::FailBefore(StoreErrorKind::Denied));
        assert!(matches!(next(&mut pages).await, Some(Err(Error::Store(_)))));
        assert!(next(&mut pages).await.is_none());
        assert_eq!(pages.next_page().await.unwrap().unwrap().len(), 1);
    });
}
