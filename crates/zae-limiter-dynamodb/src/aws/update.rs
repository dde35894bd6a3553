//! Updates of one item: the call of every acquire.

use std::collections::HashMap;

use aws_sdk_dynamodb::error::SdkError;
use aws_sdk_dynamodb::operation::update_item::UpdateItemError;
use aws_sdk_dynamodb::types::{
    AttributeValue, ReturnConsumedCapacity, ReturnValue, ReturnValuesOnConditionCheckFailure,
};
use zae_limiter_schema::bucket::{BucketItem, Field};
use zae_limiter_schema::{
    BucketItemKey, Consumed, Decoded, Item, Rendered, TableError, Update, Updated, item_size,
    render_update,
};

use super::convert::{from_sdk, names_to_sdk, values_to_sdk};
use super::errors::{refusal, table_error};
use super::{AwsTable, failed_write, key_to_sdk, not_empty, written};

/// An item as the SDK has parsed it.
type Attributes = HashMap<String, AttributeValue>;

/// What became of an update.
enum Sent {
    Done(Attributes, Consumed),
    Unmet(Option<Item>, Consumed),
}

impl AwsTable {
    pub(super) async fn update_once(&self, update: &Update) -> Result<Updated, TableError> {
        Ok(match self.send_update(update).await? {
            Sent::Done(item, consumed) => Updated::Done(from_sdk(item), consumed),
            Sent::Unmet(item, consumed) => Updated::Unmet(item, consumed),
        })
    }

    pub(super) async fn update_bucket_once(
        &self,
        key: &BucketItemKey,
        update: &Update,
    ) -> Result<Updated<Decoded>, TableError> {
        Ok(match self.send_update(update).await? {
            Sent::Done(item, consumed) => Updated::Done(decode(key, &item), consumed),
            Sent::Unmet(item, consumed) => Updated::Unmet(item, consumed).decode(key),
        })
    }

    async fn send_update(&self, update: &Update) -> Result<Sent, TableError> {
        let Rendered { update: expression, condition, names, values } =
            render_update(&update.actions, &update.conditions);
        let sent = self
            .updates
            .update_item()
            .table_name(&self.name)
            .set_key(Some(key_to_sdk(&update.key)))
            .update_expression(expression)
            .set_condition_expression(not_empty(condition))
            .set_expression_attribute_names(names_to_sdk(names))
            .set_expression_attribute_values(values_to_sdk(values))
            .return_values(ReturnValue::AllNew)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld)
            .return_consumed_capacity(ReturnConsumedCapacity::Total)
            .send()
            .await;
        match sent {
            Ok(output) => {
                let consumed = written(output.consumed_capacity.as_ref());
                Ok(Sent::Done(output.attributes.unwrap_or_default(), consumed))
            }
            Err(error) => match unmet(&error) {
                Some(item) => {
                    let item = item.map(from_sdk);
                    // DynamoDB bills a failed condition, but does not report how much.
                    let size = item.as_ref().map_or(0, item_size);
                    Ok(Sent::Unmet(item, failed_write(size)))
                }
                None => Err(table_error(&self.name, error)),
            },
        }
    }
}

fn decode(key: &BucketItemKey, item: &Attributes) -> Decoded {
    let fields = item.iter().map(|(name, value)| {
        let field = match value {
            AttributeValue::N(number) => Field::N(number),
            AttributeValue::S(text) => Field::S(text),
            _ => Field::Other,
        };
        (name.as_str(), field)
    });
    BucketItem::decode_fields(key, fields)
}

/// The item whose condition failed, if that is the error.
fn unmet(error: &SdkError<UpdateItemError>) -> Option<Option<Attributes>> {
    match refusal(error)? {
        UpdateItemError::ConditionalCheckFailedException(failed) => Some(failed.item.clone()),
        _ => None,
    }
}
