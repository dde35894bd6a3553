//! The keys of all items of the table, to find what belongs to nothing.

use std::sync::Arc;

use zae_limiter_core::{Key, Page, PageRequest, StoreError, Timestamp};
use zae_limiter_schema::{Item, ItemKey, ParsedKey, Value, parse_key};

use crate::cursor;
use crate::driver::{Driver, key_of};
use crate::walk::size;

const LIST: &str = "everything";

impl Driver {
    /// Lists the keys of all items. One page is one scan.
    pub(crate) async fn list_everything(
        self: &Arc<Self>,
        now: Timestamp,
        page: &PageRequest,
    ) -> Result<Page<Key>, StoreError> {
        let after = match cursor::read(page, &[LIST])? {
            None => None,
            Some((_, texts)) => {
                let [pk, sk] = <[String; 2]>::try_from(texts).map_err(|_| cursor::foreign())?;
                Some(ItemKey::new(pk, sk))
            }
        };
        let scanned = self.scan(after, size(page)).await?;
        let items = scanned.items.iter().filter_map(|item| listed(item, now)).collect();
        let next = scanned.next.map(|key| cursor::write(LIST, [key.pk.as_str(), key.sk.as_str()]));
        Ok(Page { items, next })
    }
}

fn listed(item: &Item, now: Timestamp) -> Option<Key> {
    match parse_key(&key_of(item)?)? {
        ParsedKey::Record(key) => Some(key),
        ParsedKey::Shard(shard) => Some(Key::Bucket(shard.bucket)),
        ParsedKey::Resources(ns) | ParsedKey::EntityConfigResources(ns) => Some(Key::Namespace(ns)),
        ParsedKey::Version => None,
        ParsedKey::Tombstone(scope) => {
            let expiry = item.get("ttl").and_then(Value::as_i64)?;
            (expiry <= now.as_millis().div_euclid(1_000)).then_some(Key::Tombstone(scope))
        }
    }
}
