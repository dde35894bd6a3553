//! Converts the SDK's types.

use aws_sdk_cloudformation::types::{Parameter, Stack, Tag};
use aws_sdk_dynamodb::types::TableDescription;

use crate::cloud::{StackEvent, StackState, Status, TableFigures};
use crate::plan::StackPlan;

pub(super) fn stack(stack: Stack) -> StackState {
    let millis = |at: Option<&aws_sdk_cloudformation::primitives::DateTime>| {
        at.and_then(|at| at.to_millis().ok())
    };
    let (created_at, updated_at) =
        (millis(stack.creation_time.as_ref()), millis(stack.last_updated_time.as_ref()));
    let parameters = stack.parameters.unwrap_or_default().into_iter();
    let outputs = stack.outputs.unwrap_or_default().into_iter();
    let tags = stack.tags.unwrap_or_default().into_iter();
    StackState {
        name: stack.stack_name.unwrap_or_default(),
        id: stack.stack_id.unwrap_or_default(),
        status: Status(stack.stack_status.map_or(String::new(), |one| one.as_str().to_owned())),
        reason: stack.stack_status_reason.filter(|reason| !reason.is_empty()),
        created_at,
        updated_at,
        parameters: parameters
            .filter_map(|one| Some((one.parameter_key?, one.parameter_value?)))
            .collect(),
        outputs: outputs.filter_map(|one| Some((one.output_key?, one.output_value?))).collect(),
        tags: tags.filter_map(|one| Some((one.key?, one.value?))).collect(),
    }
}

pub(super) fn event(event: aws_sdk_cloudformation::types::StackEvent) -> StackEvent {
    let status = event.resource_status.map_or(String::new(), |one| one.as_str().to_owned());
    StackEvent {
        id: event.event_id.unwrap_or_default(),
        resource: event.logical_resource_id.unwrap_or_default(),
        kind: event.resource_type.unwrap_or_default(),
        physical_id: event.physical_resource_id.unwrap_or_default(),
        status: Status(status),
        reason: event.resource_status_reason.filter(|reason| !reason.is_empty()),
    }
}

/// All parameters, including empty ones. For a parameter that is not sent, CloudFormation uses the
/// default or the previous value, depending on the call.
pub(super) fn parameters(plan: &StackPlan) -> Vec<Parameter> {
    let mut all = plan.parameters.clone();
    all.entry(StackPlan::CODE_KEY.to_owned()).or_default();
    let parameter = |(key, value): (String, String)| {
        Parameter::builder().parameter_key(key).parameter_value(value).build()
    };
    all.into_iter().map(parameter).collect()
}

pub(super) fn tags(plan: &StackPlan) -> Vec<Tag> {
    plan.tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect()
}

pub(super) fn figures(table: TableDescription) -> TableFigures {
    let indexes = table.global_secondary_indexes.unwrap_or_default().into_iter().map(|index| {
        let projection = index.projection.and_then(|one| one.projection_type);
        (
            index.index_name.unwrap_or_default(),
            index.index_status.map_or(String::new(), |one| one.as_str().to_owned()),
            projection.map_or(String::new(), |one| one.as_str().to_owned()),
        )
    });
    let mut indexes: Vec<(String, String, String)> = indexes.collect();
    indexes.sort();
    TableFigures {
        status: table.table_status.map_or(String::new(), |one| one.as_str().to_owned()),
        items: table.item_count.unwrap_or_default(),
        bytes: table.table_size_bytes.unwrap_or_default(),
        indexes,
        deletion_protection: table.deletion_protection_enabled.unwrap_or_default(),
        stream: table.stream_specification.is_some_and(|stream| stream.stream_enabled),
    }
}
