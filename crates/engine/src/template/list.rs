//! Lists that a template changes with `append` and `pop`, as one of Kimi K2 does. minijinja's do not change.

use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

use super::bounds;

/// Whether a template changes lists. In all others they stay minijinja's, which copies less.
pub(super) fn changes(source: &str) -> bool {
    source.contains(".append(")
}

/// A list that can be changed.
fn growing(value: &Value) -> Result<Value, Error> {
    // A constant is copied whenever it is loaded.
    bounds::charge(
        value
            .len()
            .unwrap_or(0)
            .saturating_mul(bounds::ELEMENT_BYTES),
    )?;
    let items: Vec<Value> = value.try_iter()?.collect();
    Ok(Value::from_object(GrowingList(Mutex::new(items))))
}

/// The filter that follows what may make a list: in a template that changes lists the result is one that can be changed.
pub(super) fn settled(value: &Value) -> Result<Value, Error> {
    let is_list = value.kind() == ValueKind::Seq && !value.is_tuple();
    if !is_list || value.downcast_object_ref::<GrowingList>().is_some() {
        return Ok(value.clone());
    }
    growing(value)
}

/// Its elements are never lists of this type, namespaces or loops: a list in itself would be an endless value.
#[derive(Debug)]
struct GrowingList(Mutex<Vec<Value>>);

impl GrowingList {
    fn with<T>(&self, change: impl FnOnce(&mut Vec<Value>) -> T) -> T {
        // No panic leaves the elements in a state of its own.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Object for GrowingList {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = key.as_usize()?;
        self.with(|items| items.get(index).cloned())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.with(|items| items.len()))
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "append" => {
                let (value,): (Value,) = from_args(args)?;
                let value = copied(&bounds::stored(value)?)?;
                bounds::charge(bounds::ELEMENT_BYTES)?;
                self.with(|items| items.push(value));
                Ok(Value::from(()))
            }
            "copy" => {
                let () = from_args(args)?;
                bounds::charge(
                    self.with(|items| items.len())
                        .saturating_mul(bounds::ELEMENT_BYTES),
                )?;
                let items = self.with(|items| items.clone());
                Ok(Value::from_object(Self(Mutex::new(items))))
            }
            "pop" => {
                let (index,): (Option<i64>,) = from_args(args)?;
                let popped = self.with(|items| {
                    let index = index.unwrap_or(-1);
                    let len = i64::try_from(items.len()).unwrap_or(i64::MAX);
                    let index = if index < 0 { index + len } else { index };
                    let index = usize::try_from(index).ok()?;
                    (index < items.len()).then(|| items.remove(index))
                });
                popped.ok_or_else(|| {
                    Error::new(ErrorKind::InvalidOperation, "there is nothing to pop")
                })
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// A copy without lists that can be changed. Its depth is that of a value whose depth was checked.
fn copied(value: &Value) -> Result<Value, Error> {
    Ok(match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value
                .try_iter()?
                .map(|item| copied(&item))
                .collect::<Result<_, _>>()?;
            let elements = items.len().saturating_mul(bounds::ELEMENT_BYTES);
            bounds::charge(elements.saturating_add(bounds::OBJECT_BYTES))?;
            if value.is_tuple() {
                Value::from(Tuple::from(items))
            } else {
                Value::from(items)
            }
        }
        // It keeps no values, and its copy could not be called.
        ValueKind::Map if bounds::is_of(value, "Macro") => value.clone(),
        ValueKind::Map => {
            let mut pairs = Vec::new();
            bounds::charge(bounds::OBJECT_BYTES)?;
            for key in value.try_iter()? {
                bounds::charge(bounds::MEMBER_BYTES)?;
                let member = copied(&value.get_item(&key)?)?;
                pairs.push((key, member));
            }
            Value::from_pairs(pairs)
        }
        _ => value.clone(),
    })
}
